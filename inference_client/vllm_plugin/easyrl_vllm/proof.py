"""Proof of what a vLLM worker serves: an artifact, read again, against the bits in use.

The model's own ``load_weights`` runs on stand-ins without data (on torch's ``meta`` device): it
says which part of which tensor belongs where, fused, sharded and replicated as it may be, without
a table of names, and cannot write to what is served. Each copy that it makes is caught and compared
with the same place in the served tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from .loading import verified_chunks
from .receiving import WeightReceiver

NUM_READ_BACK = 3  # layers whose weights are kept after reading: those that are loaded in parts
BLOCK_COLUMNS = 256  # of a packed weight, per product that reads it back

aten = torch.ops.aten
ReadBack = Callable[[nn.Module, Tensor], Tensor]  # see ``read_packed``
WRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


@dataclass
class Proof:
    """What was found of one artifact on one worker."""

    checksums: dict[str, str] = field(default_factory=dict)  # name -> hash, served to the bit
    problems: dict[str, str] = field(default_factory=dict)  # name -> what differs


@torch.no_grad()
def prove(
    model: Any,  # a module of vLLM's, with load_weights
    vllm_config: VllmConfig,
    receiver: WeightReceiver,
    artifact: str,
    chunks: Sequence[Mapping[str, Any]],
) -> Proof:
    """Compares what ``model`` serves with ``artifact``, a tensor at a time.

    Memory: two chunks of the receiver, and on CPUs the unpacked weights of a few layers. Raises
    ``ValueError`` as the receiver does. Not proven, but reported as a problem: layers that are
    served quantised, and weights that the model transforms as it loads them.
    """
    proof = Proof()
    parts = disable_mtp_completeness_check()  # a tensor at a time
    with set_current_vllm_config(vllm_config), parts, stand_ins(model) as served:
        comparing = Comparing(served)
        announced = {name: h for chunk in chunks for name, h in chunk["checksums"].items()}
        for chunk in verified_chunks(receiver, artifact, chunks):
            for name, tensor in chunk:
                comparing.problem, comparing.num_compared = None, 0
                with comparing:
                    model.load_weights([(name, tensor)])
                if comparing.problem is not None:
                    proof.problems[name] = comparing.problem
                elif comparing.num_compared:
                    proof.checksums[name] = announced[name]
                elif vllm_config.parallel_config.world_size == 1:
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
    num_compared: int = 0
    optional: bool = False  # no checkpoint need hold it

    def copies(self, read_back: ReadBack) -> Iterator[tuple[str, Tensor]]:
        """Every copy of the weight that is in use, in the checkpoint's shape, and what it is.

        Raises ``CannotCompare`` if there is one in another form only.
        """
        plain = self.parameter
        if plain is not None and plain.shape == self.stand_in.shape:
            if plain.dtype != self.stand_in.dtype and not self.name.endswith("bias"):
                raise CannotCompare(f"is served as {plain.dtype}")
            yield "", plain
        elif not self.packed_in:
            form = "in no form" if plain is None else f"as {plain.dtype} {tuple(plain.shape)}"
            raise CannotCompare(f"is served {form}, which the artifact's bits do not determine")
        for layer in self.packed_in:
            yield f"packed copy in {type(layer).__name__}: ", read_back(layer, self.stand_in)

    def gap(self) -> str | None:
        """What is served but was not in the artifact."""
        needed = get_tensor_load_numel(self.stand_in)
        if self.optional or self.num_compared >= needed:
            return None
        return f"{needed - self.num_compared} of {needed} served numbers are not in the artifact"


class CannotCompare(Exception):
    """What is served cannot be compared; the message says why."""


class Comparing(TorchDispatchMode):
    """Catches what a loader writes to a stand-in and compares it with the weight served for it."""

    def __init__(self, served: Sequence[ServedWeight]) -> None:
        super().__init__()
        self._served = {storage_of(weight.stand_in): weight for weight in served}
        self._read_back = functools.lru_cache(NUM_READ_BACK)(read_packed)
        self.problem: str | None = None  # of the current tensor
        self.num_compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        self._compare(weights[id(target)], target, source.expand(target.shape))
        return target

    def _compare(self, weight: ServedWeight | None, target: Tensor, source: Tensor) -> None:
        assert weight is not None, "one tensor is written by these"
        if source.is_meta:
            self._report("is moved by its loader to where it cannot be compared")
            return
        weight.num_compared += target.numel()
        self.num_compared += target.numel()
        try:
            for copy, served in weight.copies(self._read_back):
                place = placed(served, weight.stand_in, target)
                exact = served is weight.parameter
                if difference := describe_difference(source, place, exact):
                    self._report(f"{copy}{difference}")
        except CannotCompare as error:
            self._report(str(error))

    def _report(self, problem: str) -> None:
        self.problem = self.problem or problem


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
                if name == "weight" and is_packed(layer):
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


def is_packed(layer: Any) -> bool:
    """Whether ``layer`` multiplies with a copy of its weight that no tensor shows."""
    return hasattr(layer, "cpu_linear")


def read_packed(layer: Any, like: Tensor) -> Tensor:
    """Weight ``[out, in]`` that ``layer`` multiplies with, in the dtype and layout of ``like``.

    vLLM's CPU build packs the weight of a linear layer for its kernels and keeps no other copy. A
    product with the identity gives it back exactly: each output is one product and zeros. What it
    cannot show is the sign of a zero and numbers below the smallest normal one, which the kernel
    may flush to zero: there, the layer computes with what is read back as zero.
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


def describe_difference(source: Tensor, served: Tensor, exact: bool) -> str | None:
    """What tells ``served`` from ``source``, an artifact's tensor or a part of it.

    With ``exact`` false, zeros of either sign and numbers too small for a normal one are as equal
    as the kernel that was read back can tell.
    """
    source = source.to(served.device)
    expected = source.to(served.dtype)
    if source.dtype != served.dtype and not torch.equal(expected.to(source.dtype), source):
        return (
            f"rounded from {source.dtype} to {served.dtype}; start the server with the trainer's "
            "--dtype"
        )
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[served.element_size()]
    differs = expected.view(bits) != served.view(bits)
    if not exact:
        tiny = torch.finfo(served.dtype).tiny
        differs &= ~((served == 0) & (expected.abs() < tiny))
    count = int(differs.sum())
    if count == 0:
        return None
    distance = (expected.double() - served.double()).abs()
    largest = float(torch.where(differs, distance, 0.0).max())
    return f"{count} of {differs.numel()} numbers differ, by up to {largest:.3g}"
