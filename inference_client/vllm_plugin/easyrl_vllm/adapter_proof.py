"""Proof of the adapter that a vLLM worker serves: keyed digests of what its LoRA layers hold.

An adapter's factors lie in one slot of each layer's buffers, ``lora_a_stacked`` and
``lora_b_stacked``, which the layer multiplies with: a buffer per part of a packed layer (q, k, v),
each a slice under tensor parallelism, with zeros up to the buffer's size. Which slice that is the
layer says itself: its own slicing runs on stand-ins without data, as in ``proof.py``. What the slot
holds beside the adapter has to be zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name

from .chunk_format import DTYPE_NAMES, DTYPES
from .keyed_digests import slice_digest
from .proof import CannotShow, Proof, box_of, storage_of
from .slices import ServedSlice, Slice

Asked = dict[tuple[str, bool], str]  # layer, whether it is its A → the tensor's name


@torch.no_grad()
def prove_adapter(
    manager: Any,  # vLLM's LoRAModelManager
    lora_id: int,
    nonce: bytes,
    tensors: Mapping[str, Sequence[Any]],
    *,
    alone: bool,
) -> Proof:
    """Digests of ``tensors`` (peft's name -> dtype, shape) in the slot of adapter ``lora_id``.

    ``alone``: this worker has the whole model, so that a tensor without a layer is a problem.
    Raises ``ValueError`` for a name or dtype that no adapter has.
    """
    proof = Proof()
    if lora_id not in manager.lora_index_to_id:
        proof.problems = dict.fromkeys(tensors, "its adapter is in no slot")
        return proof
    slot = manager.lora_index_to_id.index(lora_id)
    mapper = rename_mapper(manager)
    asked: Asked = {parse_fine_tuned_lora_name(name, mapper): name for name in tensors}
    for path, layer in manager.modules.items():
        parts = manager.packed_modules.get(path, [path])
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue  # what is asked of it stays, and is told below
        for is_a in (True, False):
            names = [asked.pop((part, is_a), None) for part in parts]
            _prove_factor(proof, _Factor(path, layer, is_a, slot, names), tensors, nonce)
    if alone:
        proof.problems |= dict.fromkeys(asked.values(), "the served model has no layer for it")
    return proof


def rename_mapper(manager: Any) -> Any:
    """From a checkpoint's names to the served model's; None where they are the same."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


class _Factor:
    """One of a layer's two factors in a slot, with the names of the tensors for its parts."""

    def __init__(
        self, path: str, layer: Any, is_a: bool, slot: int, names: list[str | None]
    ) -> None:
        self.path = f"{path}.lora_{'A' if is_a else 'B'}"
        self.names = names
        self.held: list[Tensor] = [
            buffers[slot, 0] for buffers in (layer.lora_a_stacked if is_a else layer.lora_b_stacked)
        ]
        self._layer, self._is_a = layer, is_a

    def sliced(self, sources: list[Tensor | None]) -> list[Tensor | None]:
        """The part of each source that this worker serves, as the layer cuts it."""
        if self._layer.tp_size == 1 or not any(source is not None for source in sources):
            return sources
        cut = self._layer.slice_lora_a if self._is_a else self._layer.slice_lora_b
        return list(cut(sources)) if len(sources) > 1 else [cut(sources[0])]


def _prove_factor(
    proof: Proof, factor: _Factor, tensors: Mapping[str, Sequence[Any]], nonce: bytes
) -> None:
    sources = [None if name is None else _stand_in(name, tensors) for name in factor.names]
    parts = factor.sliced(sources)
    if not len(parts) == len(sources) == len(factor.held):
        told = f"{factor.path}: {len(sources)} tensors for {len(factor.held)} buffers"
        proof.problems |= {name or factor.path: told for name in factor.names}
        return
    for name, source, part, held in zip(factor.names, sources, parts, factor.held, strict=True):
        try:
            served = _shown(held, source, part, nonce)
        except CannotShow as error:
            proof.problems[name or factor.path] = str(error)
            continue
        if name is not None and served is not None:
            proof.slices.setdefault(name, []).append(served)


def _shown(
    held: Tensor, source: Tensor | None, part: Tensor | None, nonce: bytes
) -> ServedSlice | None:
    """What a buffer ``held`` [rows, columns] has of ``part``, a view of ``source``.

    Raises ``CannotShow`` if the view is no box of it, or the rest of the buffer is not zero.
    """
    rows, columns = (0, 0) if part is None else part.shape
    if held[rows:].any() or held[:rows, columns:].any():
        raise CannotShow("its slot holds numbers that are not in the adapter")
    if part is None or source is None or not part.numel():
        return None
    if storage_of(part) != storage_of(source):
        raise CannotShow("is rearranged as it is loaded, which cannot be compared")
    starts, sizes, order = box_of(part, source.shape)
    place = held[:rows, :columns]
    digest = slice_digest(place.permute(order), nonce)
    return ServedSlice(Slice(starts, sizes, DTYPE_NAMES[place.dtype]), digest)


def _stand_in(name: str, tensors: Mapping[str, Sequence[Any]]) -> Tensor:
    dtype, shape = tensors[name]
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name!r}: {dtype!r} cannot be sent")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` has its own layers in the place of vLLM's LoRA layers around them.

    Its ``load_weights`` knows no others. Nothing may be generated meanwhile.
    """
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, BaseLayerWithLoRA)
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer  # type: ignore[assignment]
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
