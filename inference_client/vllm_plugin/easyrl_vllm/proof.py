"""Proof of what a vLLM worker serves: keyed digests of its slices of a checkpoint's tensors.

The model's own ``load_weights`` runs on stand-ins without data (on torch's ``meta`` device), for
the checkpoint's tensors as for the model's: it says which slice of which tensor belongs where,
fused, sharded and replicated as it may be, without a table of names, and cannot write to what is
served. For each copy that it makes, the same place in the served tensor is read and hashed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    materialize_meta_tensor,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from .chunk_format import DTYPE_NAMES, DTYPES
from .keyed_digests import slice_digest
from .slices import ServedSlice, Slice

NUM_READ_BACK = 3  # layers whose weights are kept after reading: those that are loaded in parts
BLOCK_COLUMNS = 256  # of a packed weight, per product that reads it back

aten = torch.ops.aten
ReadBack = Callable[[nn.Module, Tensor], Tensor]  # see ``read_packed``
KEEPS_NUMBERS = (aten.clone.default, aten._to_copy.default)
WRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


@dataclass
class Proof:
    """What one worker shows of a checkpoint's tensors."""

    slices: dict[str, list[ServedSlice]] = field(default_factory=dict)  # by name
    problems: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be shown

    def bit_for_bit(self) -> frozenset[str]:
        """Names of what is shown with every bit that this worker serves of it."""
        return frozenset(
            name
            for name, slices in self.slices.items()
            if name not in self.problems and not any(served.slice.flushed for served in slices)
        )


@torch.no_grad()
def prove(
    model: Any,  # a module of vLLM's, with load_weights
    vllm_config: VllmConfig,
    nonce: bytes,
    tensors: Mapping[str, Sequence[Any]],
) -> Proof:
    """Digests of what ``model`` serves of ``tensors`` (name -> dtype, shape), keyed with ``nonce``.

    Memory: the largest tensor on the CPU, and on CPUs the unpacked weights of a few layers. Raises
    ``ValueError`` for a dtype that cannot be sent, and what ``load_weights`` raises. Not shown, but
    reported as a problem: layers that are served quantised, and weights that the model transforms
    as it loads them.
    """
    proof = Proof()
    parts = disable_mtp_completeness_check()  # a tensor at a time
    with set_current_vllm_config(vllm_config), parts, stand_ins(model) as served:
        loading = ObservedLoading(served, nonce)
        for name, (dtype, shape) in tensors.items():
            if dtype not in DTYPES:
                raise ValueError(f"tensor {name!r}: {dtype!r} cannot be sent")
            source = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            loading.begin(source)
            try:
                with loading:
                    model.load_weights([(name, source)])
            except CannotShow as error:
                proof.problems[name] = str(error)
                continue
            if loading.problem is not None:
                proof.problems[name] = loading.problem
            elif loading.slices:
                proof.slices[name] = loading.slices
            elif source.numel() and vllm_config.parallel_config.world_size == 1:
                proof.problems[name] = "the served model has no use for it"
        proof.problems |= {weight.name: gap for weight in served if (gap := weight.gap())}
    return proof


@dataclass(eq=False)
class ServedWeight:
    """A parameter of one or, if tied, several layers."""

    name: str
    stand_in: Tensor  # like the parameter before post-processing, without data
    parameter: Tensor | None
    packed_in: list[nn.Module] = field(default_factory=list)
    num_loaded: int = 0  # numbers that the checkpoint's tensors and its loader have given
    optional: bool = False  # no checkpoint need hold it

    def copies(self, read_back: ReadBack) -> Iterator[tuple[str, Tensor]]:
        """Every copy of the weight that is in use, in the checkpoint's shape, and what it is.

        Raises ``CannotShow`` if there is one in another form only.
        """
        plain = self.parameter
        if plain is not None and plain.shape == self.stand_in.shape:
            if plain.dtype != self.stand_in.dtype and not self.name.endswith("bias"):
                raise CannotShow(f"is served as {plain.dtype}")
            yield "", plain
        elif not self.packed_in:
            form = "in no form" if plain is None else f"as {plain.dtype} {tuple(plain.shape)}"
            raise CannotShow(f"is served {form}, which the artifact's bits do not determine")
        for layer in self.packed_in:
            yield f"packed copy in {type(layer).__name__}: ", read_back(layer, self.stand_in)

    def gap(self) -> str | None:
        """What is served but was not in the artifact."""
        needed = get_tensor_load_numel(self.stand_in)
        if self.optional or self.num_loaded >= needed:
            return None
        return f"{needed - self.num_loaded} of {needed} served numbers are not in the artifact"


class CannotShow(Exception):
    """What is served cannot be hashed as the checkpoint has it; the message says why."""


class ObservedLoading(TorchDispatchMode):
    """Catches what a loader writes to a stand-in and hashes the weight that is served for it."""

    def __init__(self, served: Sequence[ServedWeight], nonce: bytes) -> None:
        super().__init__()
        self._served = {storage_of(weight.stand_in): weight for weight in served}
        self._read_back = functools.lru_cache(NUM_READ_BACK)(read_packed)
        self._nonce = nonce
        self.begin(torch.empty(0, device="meta"))

    def begin(self, source: Tensor) -> None:
        """``source`` stands for the checkpoint's tensor that is loaded next."""
        self._source = source
        self.slices: list[ServedSlice] = []
        self.problem: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KEEPS_NUMBERS and storage_of(args[0]) == storage_of(self._source):
            return args[0]  # where its numbers go does not depend on dtype and layout
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            raise CannotShow("is loaded as a number, not as a tensor, which cannot be compared")
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.is_write and isinstance(value, Tensor)
        ]
        written += [kwargs[key] for key in ("out",) if isinstance(kwargs.get(key), Tensor)]
        weights = {id(t): self._served.get(storage_of(t)) for t in written}
        if not any(weights.values()):
            return func(*args, **kwargs)
        if func not in WRITES:
            self._report(f"is changed as it is loaded ({func}), which cannot be compared")
            return func(*args, **kwargs)  # to no effect: stand-ins hold no data
        target = args[0]
        source = args[1] if len(args) > 1 else 0
        if not isinstance(source, Tensor):
            source = torch.tensor(source, dtype=target.dtype)
        self._observe(weights[id(target)], target, source.expand(target.shape))
        return target

    def _observe(self, weight: ServedWeight | None, target: Tensor, source: Tensor) -> None:
        assert weight is not None, "one tensor is written by these"
        weight.num_loaded += target.numel()
        try:
            if source.is_meta and storage_of(source) != storage_of(self._source):
                raise CannotShow("is transformed as it is loaded, which cannot be compared")
            for copy, served in weight.copies(self._read_back):
                place = placed(served, weight.stand_in, target)
                flushed = served is not weight.parameter
                if source.is_meta:
                    self._hash(place, source, flushed, copy)
                elif not torch.equal(place.cpu(), source.to(place.dtype)):
                    raise CannotShow(f"{copy}is not {source.flatten()[:1].tolist()} where padded")
        except CannotShow as error:
            self._report(str(error))

    def _hash(self, place: Tensor, source: Tensor, flushed: bool, copy: str) -> None:
        if not source.numel():
            return
        starts, sizes, order = box_of(source, self._source.shape)
        digest = slice_digest(place.permute(order), self._nonce, flushed=flushed)
        shown = Slice(starts, sizes, DTYPE_NAMES[place.dtype], flushed)
        self.slices.append(ServedSlice(shown, digest, copy))

    def _report(self, problem: str) -> None:
        self.problem = self.problem or problem


Dimensions = tuple[int, ...]


def box_of(view: Tensor, shape: Sequence[int]) -> tuple[Dimensions, Dimensions, list[int]]:
    """Which box of a contiguous tensor of ``shape`` the view of it is: starts, sizes.

    And the order of the view's dimensions in which its numbers come as in the box, row by row.
    Raises ``CannotShow`` if it is no box.
    """
    order = sorted(range(view.dim()), key=lambda d: view.stride(d), reverse=True)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = view.storage_offset()
    last = first + sum((view.size(d) - 1) * view.stride(d) for d in order)
    starts = tuple(first // strides[d] % shape[d] for d in range(len(shape)))
    ends = tuple(last // strides[d] % shape[d] for d in range(len(shape)))
    sizes = tuple(end - start + 1 for start, end in zip(starts, ends, strict=True))
    ordered = [(view.size(d), view.stride(d)) for d in order]
    if _merged(zip(sizes, strides, strict=True)) != _merged(ordered):
        raise CannotShow("is rearranged as it is loaded, which cannot be compared")
    return starts, sizes, order


def _merged(dimensions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides, without dimensions of 1 and with neighbours that are one, as one."""
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if merged and merged[-1][1] == size * stride and size != 1:
            merged[-1] = merged[-1][0] * size, stride
        elif size != 1:
            merged.append((size, stride))
    return merged


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[list[ServedWeight]]:
    """Puts stand-ins in the place of all parameters of ``model``, then the parameters back."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    weights: dict[int, ServedWeight] = {}
    try:
        for path, layer in model.named_modules():
            parameters = dict(layer._parameters)
            kept.append((layer, parameters))
            for name, stand_in in stand_ins_of(layer):
                parameter = parameters.get(name)
                key = id(stand_in) if parameter is None else id(parameter)
                if key not in weights:
                    weights[key] = ServedWeight(f"{path}.{name}", stand_in, parameter)
                weight = weights[key]
                # tied layers share one stand-in, as they share one parameter
                layer._parameters[name] = weight.stand_in  # type: ignore[assignment]
                weight.optional |= is_deferred_attention_layer(layer) or name in SKIP_LOAD_TENSORS
                if name == "weight" and is_packed(layer, weight.stand_in):
                    weight.packed_in.append(layer)
        yield list(weights.values())
    finally:
        for layer, parameters in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)


def stand_ins_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and stand-in of each parameter, with the loader that it was created with."""
    created = dict(get_layerwise_info(layer).restore_metadata[0])
    for name, parameter in layer._parameters.items():
        if parameter is not None and name not in created:
            created[name] = to_meta_tensor(parameter)
    for name, tensor in created.items():
        with torch.device("meta"):
            stand_in = restore_layer_refs(materialize_meta_tensor(tensor), layer)
        loader = stand_in.__dict__.get("weight_loader", stand_in.__dict__.get("_weight_loader"))
        while hasattr(loader, "__wrapped__"):  # by an update before
            loader = loader.__wrapped__
        if loader is not None:
            stand_in.weight_loader = loader
        yield name, stand_in


def is_packed(layer: Any, like: Tensor) -> bool:
    """Whether ``layer`` multiplies with a copy of its weight ``like [out, in]`` of its own.

    vLLM's CPU build packs weights where its kernels know the dtype on the processor at hand;
    elsewhere (bf16 without AVX-512) it multiplies with the parameter that it is given.
    """
    if not hasattr(layer, "cpu_linear"):
        return False
    try:
        layer.cpu_linear(torch.zeros(1, like.shape[1], dtype=like.dtype), None, None)
    except TypeError:  # there is no product with None
        return False
    return True


def read_packed(layer: Any, like: Tensor) -> Tensor:
    """Weight ``[out, in]`` that ``layer`` multiplies with, in the dtype and layout of ``like``.

    A product with the identity gives a packed weight (``is_packed``) back exactly: each output is
    one product and zeros. What it cannot show is the sign of a zero and numbers below the smallest
    normal one, which the kernel may flush to zero: there, the layer computes with what is read
    back as zero.
    """
    num_rows, num_columns = like.shape
    weight = torch.empty(num_rows, num_columns, dtype=like.dtype)
    for start in range(0, num_columns, BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, num_columns)
        unit = torch.zeros(end - start, num_columns, dtype=like.dtype)
        unit[:, start:end].fill_diagonal_(1)
        weight[:, start:end] = layer.quant_method.apply(layer, unit, None).t()
    return weight


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def placed(served: Tensor, stand_in: Tensor, target: Tensor) -> Tensor:
    """The part of ``served`` that ``target`` is of ``stand_in``."""
    if served.stride() != stand_in.stride():
        arranged = torch.empty_strided(
            stand_in.shape, stand_in.stride(), dtype=served.dtype, device=served.device
        )
        served = arranged.copy_(served)
    offset = served.storage_offset() + target.storage_offset()
    return torch.as_strided(served.detach(), target.shape, target.stride(), offset)
