"""One weight update of a vLLM model, layer by layer and in place.

vLLM's layerwise reload keeps the tensors of a layer until all have come, loads them into a fresh
layer, runs its post-processing (quantisation, packing for the CPU's kernels) and copies the result
into the tensors that are served, whose addresses CUDA graphs hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from .adapter_proof import without_adapters
from .receiving import WeightReceiver


class WeightUpdate:
    """An open update of ``model``: any number of ``load``, then ``finish`` or ``abandon``."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model: Any = model  # nn.Module knows no load_weights
        self._model_config = model_config
        self._source: str | None = None  # the artifact that all chunks come from
        self._names: set[str] = set()  # tensors that came
        self._tied = tied_layers(model)
        initialize_layerwise_reload(model)

    def load(
        self, receiver: WeightReceiver, artifact: str, chunks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Loads verified chunks; on an error the update has to be abandoned.

        Raises ``ValueError`` for a chunk of another artifact than the first one's, a tensor that
        came before, and whatever ``receiver`` refuses.
        """
        self.take_from(f"artifact {artifact!r}")
        for chunk in verified_chunks(receiver, artifact, chunks):
            names = [name for name, _ in chunk]
            if repeated := self._names.intersection(names):
                raise ValueError(f"artifact {artifact!r}: {min(repeated)!r} came twice")
            # a part of the tensors only; a server may have been started for adapters, too
            with disable_mtp_completeness_check(), without_adapters(self._model):
                self._model.load_weights(chunk)
            self._names.update(names)
            self._keep_unprocessed({tensor.untyped_storage().data_ptr() for _, tensor in chunk})

    def take_from(self, source: str) -> None:
        """Raises ``ValueError`` if the update has begun with tensors from another source."""
        if self._source not in (None, source):
            raise ValueError(f"{source}: this update has begun with {self._source}; abandon it")
        self._source = source

    def finish(self) -> None:
        """Serves the new weights. Raises ``ValueError`` naming what did not come."""
        if missing := self._missing():
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(
                f"weight update is incomplete, did not arrive: {', '.join(missing[:5])}{more}"
            )
        finalize_layerwise_reload(self._model, self._model_config)
        # A head that shares the embedding's tensor got the new bits with it, but on CPUs it
        # computes with a packed copy of its own.
        for layer in self._tied.values():
            layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Puts the served tensors back; layers that had all their tensors keep the new ones."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            info.load_numel = 0  # so that finalizing finds nothing to process
            info.loaded_weights = []
        finalize_layerwise_reload(self._model, self._model_config)

    def _keep_unprocessed(self, buffers: set[int]) -> None:
        """Copies what waits for the rest of its layer out of the receiver's ``buffers``."""
        for layer in self._model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in buffers:
                        call.arguments[key] = value.clone()

    def _missing(self) -> list[str]:
        missing = []
        for name, layer in self._model.named_modules():
            if name not in self._tied and not is_deferred_attention_layer(layer):
                missing += [f"{name}.{tensor}" for tensor in self._missing_in(layer)]
        return missing

    def _missing_in(self, layer: nn.Module) -> list[str]:
        """Parameters of ``layer`` that did not come, or ``name (part of it)``."""
        info = get_layerwise_info(layer)
        if not info.can_load():  # complete and processed, or nothing to load
            return []
        came = {name for name, _ in info.loaded_weights}
        parameters = {
            name: parameter
            for name, parameter in layer.named_parameters(recurse=False)
            if name not in SKIP_LOAD_TENSORS
        }
        if self._model_config.quantization is not None and came:
            return []  # a quantised layer also has parameters that no checkpoint holds
        absent = [name for name in parameters if name not in came]
        if absent or isinstance(layer, VocabParallelEmbedding):
            return absent  # a vocabulary comes whole; rows that pad it are not loaded
        if info.load_numel < sum(get_tensor_load_numel(p) for p in parameters.values()):
            return [f"{', '.join(parameters)} (part of it)"]
        return []


def verified_chunks(
    receiver: WeightReceiver, artifact: str, chunks: Sequence[Mapping[str, Any]]
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of each chunk, valid until the next chunk is asked for.

    Raises ``ValueError`` naming artifact and file: vLLM takes paths out of what it answers.
    """
    tensors = receiver.tensors(artifact, chunks)
    for chunk in chunks:
        try:
            # next() and not islice: asking for one more would give the chunk's buffer away
            verified = [next(tensors) for _ in chunk["checksums"]]
        except ValueError as error:
            raise ValueError(f"artifact {artifact!r}, file {chunk['file']!r}: {error}") from error
        yield verified
    if next(tensors, None) is not None:
        raise AssertionError("the receiver handed out more tensors than were announced")


def tied_layers(model: nn.Module) -> dict[str, Any]:
    """Name → layer for those whose weight is another, earlier layer's own tensor."""
    owners: set[int] = set()
    tied = {}
    for name, layer in model.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            if id(layer.weight) in owners:
                tied[name] = layer
            owners.add(id(layer.weight))
    return tied


def synchronize(device: torch.device) -> None:
    """Waits for the device. A CPU has nothing to wait for, and to torch it is no accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
