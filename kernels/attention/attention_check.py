"""Attention that picks its backend, and does not trust it before it has agreed with the reference.

A fused kernel may be wrong for one driver, head size or build, and nothing would show it but a
model that learns badly.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from easyrl.kernels.attention.attention_agreement import agreement_with_reference
from easyrl.kernels.attention.padded_attention import suits
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import BACKENDS, load_backend

logger = logging.getLogger(__name__)

# Up to here the reference's one call beats several smaller ones on a CPU (measured with 8 heads of
# 64; forward and backward). Anywhere such rows are too small to judge a backend by, and a run's
# first ones often are: a probe's, or what stands in for a missing micro-batch.
_TINY_ROW = 256
_HALF = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)
_REFERENCE = "reference"


class _Use(NamedTuple):
    """What a verdict holds for."""

    backend: str
    device: str  # its type
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_size: int
    shape: str
    tiny: bool

    def __str__(self) -> str:
        return (
            f"attention backend {self.backend} on {self.device} in {self.dtype} with "
            f"{self.query_heads} query and {self.key_heads} key heads of size {self.head_size} "
            f"({'tiny rows, ' * self.tiny}{self.shape})"
        )


class CheckedAttention:
    """Shared-prompt attention by the backend that is wanted, checked at its first use.

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
        """As ``reference_attention``; ``scale`` is 1/√D unless given.

        Raises ``ValueError`` if ``query`` is not one row of the layout's length.
        """
        num_rows, heads, num_tokens, size = query.shape
        if num_rows != 1 or num_tokens != layout.num_tokens:
            raise ValueError(
                f"query is {tuple(query.shape)}, the layout is one row of "
                f"{layout.num_tokens} tokens: [1, heads, {layout.num_tokens}, head size]"
            )
        call = (query, key, value, layout, size**-0.5 if scale is None else scale)
        device, dtype = query.device, query.dtype
        names: tuple[str, ...] = (self.wanted,)
        if self.wanted == "auto":
            names = backends_in_order(device, dtype, size, layout)
        shape, tiny = _shape(layout), num_tokens <= _TINY_ROW
        for name, next_best in zip(names, (*names[1:], None), strict=True):
            use = _Use(name, device.type, dtype, heads, key.shape[1], size, shape, tiny)
            if use not in self._trusted:
                self._check(use, call, next_best)
            if self._trusted[use]:
                return load_backend(name)(*call)
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


def _shape(layout: SegmentLayout) -> str:
    """What a simple row shows says little about one with more parts to it."""
    parents = [parent for _, _, parent in layout.segments if parent >= 0]
    if not parents:
        return "segments without parents"
    if len(set(parents)) == len(parents):
        return "one segment below another"
    flat = all(layout.segments[parent][2] < 0 for parent in parents)
    return "several segments below another" if flat else "several levels of segments"


def backends_in_order(
    device: torch.device, dtype: torch.dtype, head_size: int, layout: SegmentLayout
) -> tuple[str, ...]:
    """Best first, the last is the reference. Whether their packages are installed is not looked
    at; the one to use is the first that works. Tiny rows take the reference on every device."""
    if layout.num_tokens <= _TINY_ROW:
        return (_REFERENCE,)
    own: tuple[str, ...] = ("npu",) * (device.type == "npu")
    if device.type == "cpu" and suits(layout):
        own = ("padded",)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _AMPERE:
        # Limits as the kernels state them; older GPUs lack the instructions of both.
        varlen = dtype in _HALF and head_size <= 256 and head_size % 8 == 0
        flex = dtype in (*_HALF, torch.float32) and head_size >= 16
        own = ("varlen",) * varlen + ("flex",) * flex
    return (*own, "merged", _REFERENCE)
