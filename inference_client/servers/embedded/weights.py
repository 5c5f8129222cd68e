"""The weights that the embedded engine serves: names, versions, updates in place, proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.inference_client.transfer.artifact import tensor_checksum
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPE_NAMES
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import slice_digest, whole_slice
from easyrl.inference_client.vllm_plugin.easyrl_vllm.owed_proof import REFUSAL, OwedProof
from easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving import WeightReceiver
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice

INITIAL_VERSION = "default"  # vLLM's name for the weights a server started with
TensorShapes = Mapping[str, tuple[str, Sequence[int]]]  # by name: safetensors' dtype, shape


@dataclass(slots=True)
class _Update:
    """An update that is open."""

    missing: set[str]
    artifact: str | None = None  # all chunks belong to one
    has_written: bool = False


@dataclass(frozen=True, slots=True)
class ServedProof:
    """What is served: keyed digests of all tensors, whole."""

    transport: str  # by which artifacts come in, file or http
    slices: dict[str, list[ServedSlice]] = field(default_factory=dict)  # by name
    problems: dict[str, str] = field(default_factory=dict)  # by name


class ServedWeights:
    """A model's parameters under the names that ``save_pretrained`` gives them.

    An update is ``start``, any number of ``load``, ``finish``. If anything in it fails after a
    tensor was written the weights are ``broken`` (a mixture) until an update has completed; the
    version stays. They are, too, while they owe a proof (``OwedProof``).

    Commands give futures and run one after the other in a thread of their own: reading an artifact
    may take long, or hang with the trainer that serves it; meanwhile the engine answers everything
    else. Whether an update is open is decided in the engine's thread, so that no decode step sees
    half of one.

    Args:
        in_engine: runs a function in the engine's thread between two decode steps.
        on_finish: called there when new weights are served.
    """

    def __init__(
        self,
        model: nn.Module,
        in_engine: Callable[[Callable[[], None]], Future[None]],
        on_finish: Callable[[], None],
    ) -> None:
        self.version = INITIAL_VERSION
        self._mixed: str | None = None  # why the weights are a mixture
        self._owed = OwedProof()
        self._tensors = dict(_saved_views(model))
        self._in_engine = in_engine
        self._on_finish = on_finish
        self._thread = ThreadPoolExecutor(1, "embedded-weights")
        self._receiver: WeightReceiver | None = None
        self._update: _Update | None = None

    @property
    def broken(self) -> str | None:
        """Why the weights cannot be used."""
        return self._mixed or (REFUSAL if self._owed.is_owed else None)

    @property
    def update_is_open(self) -> bool:
        return self._update is not None

    def announce(self, init_info: Mapping[str, Any]) -> Future[None]:
        """What the trainer says of its artifacts. Raises as ``WeightReceiver`` does."""

        def run() -> None:
            receiver = WeightReceiver(init_info)
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = receiver

        return self._thread.submit(run)

    def start(self) -> Future[None]:
        """Opens an update; generation holds until it is finished or has failed.

        Raises ``ValueError`` if one is open or no trainer is known.
        """

        def run() -> None:
            self._known_receiver()
            if self._update is not None:
                raise ValueError(
                    'a weight update is open; finish it, or send {"abandon": true} to '
                    "/update_weights"
                )
            self._update = _Update(set(self._tensors))
            self._owed.begin()

        return self._between_steps(run)

    def load(self, artifact: str, chunks: Sequence[Mapping[str, Any]]) -> Future[None]:
        """Writes chunks of an artifact into the parameters; an error ends the update.

        Raises ``ValueError``, naming the tensor, on an unknown name, a wrong shape or dtype, a
        wrong hash, chunks of two artifacts, or if no update is open.
        """

        def run() -> None:
            try:
                update = self._opened()
                if update.artifact not in (None, artifact):
                    raise ValueError(
                        f"artifact {artifact!r}: this update has begun with {update.artifact!r}; "
                        "one update takes one artifact"
                    )
                tensors = self._known_receiver().tensors(artifact, chunks, self._place)
                self._owed.take(chunks)
                update.artifact = artifact
                for name, weight in tensors:
                    served = self._tensors[name]
                    if weight.data_ptr() != served.data_ptr():
                        served.copy_(weight)
                    update.missing.discard(name)
            except BaseException as error:
                reason = str(error)
                self._in_engine(lambda: self._abandon(reason)).result()
                raise

        return self._thread.submit(run)

    def abandon(self) -> Future[None]:
        """Closes the update without a new version; nothing happens if none is open."""
        return self._between_steps(lambda: self._abandon("it was abandoned"))

    def finish(self, version: str | None) -> Future[None]:
        """Closes the update, takes ``version``. Raises ``ValueError`` if a tensor did not come."""

        def run() -> None:
            missing = sorted(self._opened().missing)
            if missing:
                reason = (
                    f"weight update is incomplete: {missing[0]!r} did not arrive "
                    f"({len(missing)} of {len(self._tensors)} tensors missing)"
                )
                self._abandon(reason)
                raise ValueError(reason)
            self._update = None
            self._mixed = None
            self._owed.finish()
            if version is not None:
                self.version = version
            self._on_finish()

        return self._between_steps(run)

    def checksums(self) -> Future[dict[str, str]]:
        """blake3 of each tensor as it is served, by its saved name."""
        return self._thread.submit(self._checksums)

    def prove(self, nonce: bytes, asked: Set[str]) -> Future[ServedProof]:
        """Hashes what is served, keyed with ``nonce``; problems where it is not what is ``asked``.

        Raises ``ValueError`` while an update is open and before ``announce``.
        """

        def run() -> ServedProof:
            if self._update is not None:
                raise ValueError("a weight update is open; finish or abandon it before the proof")
            receiver = self._known_receiver()
            proof = ServedProof(receiver.transport)
            for name in asked - self._tensors.keys():
                proof.problems[name] = "the served model has no weight of this name"
            for name in self._tensors.keys() - asked:
                proof.problems[name] = "is served, but the artifact does not hold it"
            for name in asked & self._tensors.keys():
                tensor = self._tensors[name]
                whole = whole_slice(tensor.dtype, tensor.shape)
                proof.slices[name] = [ServedSlice(whole, slice_digest(tensor, nonce))]
            if asked:
                receiver.provable = frozenset(proof.slices)
                self._owed.answered(nonce.hex())
            return proof

        return self._thread.submit(run)

    def accept_proof(self, nonce: bytes) -> Future[None]:
        """The answer to ``nonce`` was right. Raises ``ValueError`` if it was of other weights."""
        return self._thread.submit(lambda: self._owed.accept(nonce.hex()))

    def compare_shapes(self, asked: TensorShapes) -> Future[dict[str, str]]:
        """By name, why a tensor of ``asked`` could not be loaded, or is missing there.

        Reads no number, and needs no ``announce``.
        """
        return self._thread.submit(lambda: dict(self._shape_problems(asked)))

    def close(self) -> None:
        """Ends the thread and the connection to the trainer."""
        if self._receiver is not None:
            self._receiver.close()
        self._thread.shutdown(cancel_futures=True)

    def _between_steps(self, function: Callable[[], None]) -> Future[None]:
        return self._thread.submit(lambda: self._in_engine(function).result())

    def _abandon(self, reason: str) -> None:
        if self._update is not None and self._update.has_written:
            self._mixed = f"the last weight update failed: {reason}"
        self._update = None

    def _shape_problems(self, asked: TensorShapes) -> Iterator[tuple[str, str]]:
        for name, (dtype, shape) in asked.items():
            served = self._tensors.get(name)
            if served is None:
                yield name, "the served model has no weight of this name"
            elif tuple(served.shape) != tuple(shape):
                yield name, f"has shape {list(shape)}, the served model's {list(served.shape)}"
            elif DTYPE_NAMES[served.dtype] != dtype:
                yield name, f"is {dtype}, the served model's {DTYPE_NAMES[served.dtype]}"
        for name in self._tensors.keys() - asked.keys():
            yield name, "is served, but the trainer's model has no weight of this name"

    def _checksums(self) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self._tensors.items()}

    def _opened(self) -> _Update:
        if self._update is None:
            raise ValueError("no weight update is open; call /start_weight_update first")
        return self._update

    def _known_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise ValueError(
                "no trainer has announced its weights; call /init_weight_transfer_engine first"
            )
        return self._receiver

    def _place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        """The parameter itself where bytes can be put into it."""
        target = self._tensors.get(name)
        if target is None:
            raise ValueError(f"the model has no weight {name!r}")
        if tuple(target.shape) != shape:
            raise ValueError(
                f"weight {name!r} has shape {shape}, the model's has {tuple(target.shape)}"
            )
        if target.dtype != dtype:
            raise ValueError(
                f"weight {name!r} is {dtype}, the server's is {target.dtype}; "
                "start the server with the trainer's --dtype"
            )
        self._opened().has_written = True
        in_place = target.device.type == "cpu" and target.is_contiguous()
        return target if in_place else None


def _saved_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Views of the parameters, one per saved tensor; a tied parameter appears once.

    ``transformers`` fuses the experts of a mixture into one parameter per projection and saves each
    expert on its own.
    """
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj" and prefix.endswith(".experts"):
            for expert, weight in enumerate(parameter.data):
                gate, up = weight.chunk(2, dim=0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif last == "down_proj" and prefix.endswith(".experts"):
            for expert, weight in enumerate(parameter.data):
                yield f"{prefix}.{expert}.down_proj.weight", weight
        else:
            yield name, parameter.data
