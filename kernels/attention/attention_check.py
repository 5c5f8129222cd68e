"""Attention that picks its backend, and does not trust it before it has agreed with the reference.

A fused kernel may be wrong for one driver, head size or build, and nothing would show it but a
model that learns badly.
"""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from easyrl.kernels.attention.attention_agreement import agreement_with_reference
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import (
    BACKENDS,
    check_shapes,
    load_backend,
    shared_prompt_attention,
)

logger = logging.getLogger(__name__)

# Up to here the reference's one call beats several smaller ones on a CPU (measured with 8 heads of
# 64; forward and backward). Anywhere such rows are too small to judge a backend by, and a run's
# first ones often are: a probe's, or what stands in for a missing micro-batch.
_TINY_ROW = 256
_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
_REFERENCE = "reference"
_Shape = Literal["alone", "chain", "group", "tree"]
_SHAPES: dict[_Shape, str] = {
    "alone": "segments without parents",
    "chain": "one segment below another",
    "group": "several segments below another",
    "tree": "several levels of segments",
}


class _Use(NamedTuple):
    """What a verdict holds for."""

    backend: str
    device: str  # its type
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_size: int
    shape: _Shape
    tiny: bool

    @classmethod
    def of(cls, backend: str, query: Tensor, key: Tensor, layout: SegmentLayout) -> _Use:
        heads, size = query.shape[1], query.shape[3]
        tiny = layout.num_tokens <= _TINY_ROW
        kind = query.device.type
        return cls(backend, kind, query.dtype, heads, key.shape[1], size, _shape(layout), tiny)

    def __str__(self) -> str:
        return (
            f"attention backend {self.backend} on {self.device} in {self.dtype} with "
            f"{self.query_heads} query and {self.key_heads} key heads of size {self.head_size} "
            f"({'tiny rows, ' * self.tiny}{_SHAPES[self.shape]})"
        )


class CheckedAttention:
    """``shared_prompt_attention`` with the backend that is wanted, checked at its first use.

    ``wanted`` is a name in ``BACKENDS`` or ``"auto"``, for the best one of the device, dtype and
    row. At the first use with some dtype, heads and depth of row a backend is compared with the
    reference on the tensors of that call, forward and backward; one that is off, or raises, is not
    used again: ``auto`` warns once and takes the next best, the reference at last. A backend that
    was named raises ``RuntimeError`` instead. Tiny rows would test little: ``auto`` takes the
    reference for them, and what they show of a named backend holds for tiny rows alone.

    The first output is the backend's own, like all later ones. A call that is made again, as in
    activation checkpointing, runs what it ran before. One object belongs to one model.
    """

    def __init__(self, wanted: str = "auto") -> None:
        if wanted != "auto" and wanted not in BACKENDS:
            raise ValueError(
                f"model.attention is {wanted!r}; it is one of auto, {', '.join(BACKENDS)}"
            )
        self.wanted = wanted
        self._trusted: dict[_Use, bool] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SegmentLayout,
        scale: float | None = None,
    ) -> Tensor:
        """Shapes, ``scale`` and the ``ValueError`` are those of ``shared_prompt_attention``."""
        check_shapes(query, layout)
        call = (query, key, value, layout, query.shape[-1] ** -0.5 if scale is None else scale)
        names: tuple[str, ...] = (self.wanted,)
        if self.wanted == "auto":
            names = backends_in_order(query.device, query.dtype, query.shape[-1], layout.num_tokens)
        for name, next_best in zip(names, (*names[1:], None), strict=True):
            use = _Use.of(name, query, key, layout)
            if use not in self._trusted:
                self._check(use, call, next_best)
            if self._trusted[use]:
                return shared_prompt_attention(*call, backend=name)
        raise AssertionError("the reference is the last candidate, and always trusted")

    def _check(
        self,
        use: _Use,
        call: tuple[Tensor, Tensor, Tensor, SegmentLayout, float],
        next_best: str | None,
    ) -> None:
        """Fills in the verdict on ``use``, from what a backend is called with."""
        problem: str | None = None
        cause: Exception | None = None
        if use.backend != _REFERENCE:
            try:
                agreement = agreement_with_reference(load_backend(use.backend), *call)
            except torch.OutOfMemoryError:
                raise  # says nothing about the backend, and the next best needs no less
            except Exception as error:
                problem, cause = f"failed: {error}", error
            else:
                figure = (
                    f"(its {agreement.name} is off by {agreement.error:.1e} of its size; "
                    f"{agreement.tolerance:.0e} is tolerated)"
                )
                if agreement.holds:
                    logger.info("%s agrees with the reference %s", use, figure)
                else:
                    problem = f"does not agree with the reference {figure}"
        if problem is not None and next_best is None:
            raise RuntimeError(
                f"{use} {problem}. Set model.attention to auto, which takes the best one that "
                "works, or to reference"
            ) from cause
        self._trusted[use] = problem is None
        if problem is not None:
            logger.warning("%s %s; %s is used instead", use, problem, next_best)


def _shape(layout: SegmentLayout) -> _Shape:
    """What a simple row shows says little about one with more parts to it."""
    parents = [parent for _, _, parent in layout.segments if parent >= 0]
    if not parents:
        return "alone"
    if len(set(parents)) == len(parents):
        return "chain"
    flat = all(layout.segments[parent][2] < 0 for parent in parents)
    return "group" if flat else "tree"


def backends_in_order(
    device: torch.device, dtype: torch.dtype, head_size: int, num_tokens: int
) -> tuple[str, ...]:
    """Best first, the last is the reference. Whether their packages are installed is not looked
    at; the one to use is the first that works. Tiny rows take the reference on every device."""
    if num_tokens <= _TINY_ROW:
        return ("reference",)
    match device.type:
        case "cuda":
            return (*_of_gpus(device, dtype, head_size), "merged", "reference")
        case "npu":
            return ("npu", "merged", "reference")
        case _:
            return ("merged", "reference")


def _of_gpus(device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[str, ...]:
    """Limits as the kernels state them; older GPUs lack the instructions of both."""
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return ()
    varlen = dtype in _HALF and head_size <= 256 and head_size % 8 == 0
    flex = dtype in (*_HALF, torch.float32) and head_size >= 16
    return ("varlen",) * varlen + ("flex",) * flex
