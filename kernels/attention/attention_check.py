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
from easyrl.kernels.attention.attention_choice import backends_in_order, is_tiny
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import (
    BACKENDS,
    check_shapes,
    load_backend,
    shared_prompt_attention,
)

logger = logging.getLogger(__name__)

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
        names = self._candidates(query, layout)
        for name, next_best in zip(names, (*names[1:], None), strict=True):
            use = _use(name, query, key, layout)
            if use not in self._trusted:
                self._check(use, query, key, value, layout, scale, next_best)
            if self._trusted[use]:
                return shared_prompt_attention(query, key, value, layout, scale, backend=name)
        raise AssertionError("the reference is the last candidate, and always trusted")

    def _candidates(self, query: Tensor, layout: SegmentLayout) -> tuple[str, ...]:
        if self.wanted != "auto":
            return (self.wanted,)
        return backends_in_order(query.device, query.dtype, query.shape[-1], layout.num_tokens)

    def _check(
        self,
        use: _Use,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SegmentLayout,
        scale: float | None,
        next_best: str | None,
    ) -> None:
        """Fills in the verdict on ``use``."""
        problem: str | None = None
        cause: Exception | None = None
        if use.backend != _REFERENCE:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            try:
                agreement = agreement_with_reference(
                    load_backend(use.backend), query, key, value, layout, scale
                )
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


def _use(name: str, query: Tensor, key: Tensor, layout: SegmentLayout) -> _Use:
    return _Use(
        name,
        query.device.type,
        query.dtype,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        _shape(layout),
        is_tiny(layout.num_tokens),
    )


def _shape(layout: SegmentLayout) -> _Shape:
    """What a simple row shows says little about one with more parts to it."""
    parents = [parent for _, _, parent in layout.segments if parent >= 0]
    if not parents:
        return "alone"
    if len(set(parents)) == len(parents):
        return "chain"
    flat = all(layout.segments[parent][2] < 0 for parent in parents)
    return "group" if flat else "tree"
