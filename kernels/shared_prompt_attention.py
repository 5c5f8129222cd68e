"""Attention over a packed row that is a forest of segments: at its simplest, prompt and responses.

A token attends to all tokens of its segment's ancestors, to its own segment up to and including
itself, and to nothing else. One function, several backends in ``BACKENDS``; ``reference`` runs
everywhere and is what the others are checked against.

Shape legend: T tokens of the row, S segments, Hq query heads, Hkv key and value heads (Hq a
multiple of it), D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class SegmentLayout:
    """The forest of segments of one row, and what attention backends derive from it (cached per
    device).

    ``segments`` are triples ``(start, length, parent)``: contiguous from 0 in row order, ``parent``
    the index of an earlier segment or -1 for a root. Raises ``ValueError`` where they are not.
    """

    def __init__(self, segments: Sequence[tuple[int, int, int]]) -> None:
        _check_segments(segments)
        self.segments = tuple(segments)
        self.num_tokens = sum(length for _, length, _ in segments)  # T
        self._dense_masks: dict[torch.device, Tensor] = {}

    def dense_mask(self, device: torch.device) -> Tensor:
        """bool [T, T] on ``device``: entry (q, k) is True where query q sees key k."""
        mask = self._dense_masks.get(device)
        if mask is None:
            mask = self._dense_masks[device] = _dense_mask(self.segments, device)
        return mask


def _check_segments(segments: Sequence[tuple[int, int, int]]) -> None:
    end = 0
    for index, (start, length, parent) in enumerate(segments):
        if start != end or length < 1:
            raise ValueError(
                f"segments[{index}] is (start {start}, length {length}); segments have "
                f"at least one token and follow each other without gaps, from {end} here"
            )
        if not -1 <= parent < index:
            raise ValueError(
                f"segments[{index}] has parent {parent}; it has to be an earlier "
                f"segment, or -1 for a root"
            )
        end = start + length
    if end == 0:
        raise ValueError("a row has at least one segment")


def _dense_mask(segments: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    _, lengths, parents = torch.tensor(segments, device=device).unbind(1)
    index = torch.arange(len(segments), device=device)
    ancestors = torch.zeros(len(segments), len(segments), dtype=torch.bool, device=device)
    above = parents
    while bool((known := above >= 0).any()):  # one generation further up each time
        ancestors[index[known], above[known]] = True
        above = torch.where(known, parents[above], above)
    segment = index.repeat_interleave(lengths)  # [T], the segment of each token
    own = (segment[:, None] == segment[None, :]).tril_()
    return own.logical_or_(ancestors.index_select(0, segment).index_select(1, segment))


def shared_prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    scale: float | None = None,
    backend: str = "reference",
) -> Tensor:
    """Attention of a packed row: ``softmax(scale · q kᵀ)`` over what ``layout`` lets each token
    see, times v.

    ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D], of any floating dtype and on any
    device; the result is [1, Hq, T, D]. ``scale`` is 1/√D unless given. Differentiable. Raises
    ``ValueError`` if the row's length is not the layout's or if ``backend`` is not one of
    ``BACKENDS``.
    """
    if query.shape[0] != 1 or query.shape[2] != layout.num_tokens:
        raise ValueError(
            f"query is {tuple(query.shape)}, the layout is one row of "
            f"{layout.num_tokens} tokens: [1, heads, {layout.num_tokens}, head size]"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; there are {', '.join(BACKENDS)}")
    return BACKENDS[backend](query, key, value, layout, scale)


def _reference(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float | None
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=layout.dense_mask(query.device),
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


Backend = Callable[[Tensor, Tensor, Tensor, SegmentLayout, float | None], Tensor]
BACKENDS: dict[str, Backend] = {"reference": _reference}
