"""The last decoder layer on the tokens that something is predicted from; of the others it computes
keys and values alone.

Behind that layer a model looks at single tokens, and of a prompt only at the last one. So the
queries, the attention and the MLP of the tokens before it are left out, which changes no value and
no gradient: the loss does not depend on them.

Shape legend: T tokens of a row, W wanted ones, N predictors, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.path_gather import gather_tokens
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.activation_checkpointing import decoder_layers

SHORTEST = 32  # tokens of a segment's beginning that are left out; fewer are not worth a gap
LEAST_SHARE = 0.25  # of a row's tokens; to leave out fewer takes about as long as it saves


class WantedTokens(NamedTuple):
    """The tokens of a row that its last layer is computed for."""

    positions: Tensor  # int64 [W], of the row, ascending
    others: Tensor  # int64 [T - W], of which it computes keys and values alone
    layout: SegmentLayout  # of the row, these without queries
    predictors: Tensor  # int64 [N], their places among the wanted tokens


class StatesOfOthers:
    """Keys and values of the tokens that are not wanted; ends the pass that computes them."""

    def __init__(self) -> None:
        self.key: Tensor | None = None  # [1, heads, T - W, D]
        self.value: Tensor | None = None

    def keep(self, key: Tensor, value: Tensor) -> NoReturn:
        """Where attention would begin: what is computed behind it is not wanted."""
        self.key, self.value = key, value
        raise _AllThere


class _AllThere(Exception):
    """The keys and values are computed."""


def wanted_tokens(layout: SegmentLayout, predictor_index: Tensor) -> WantedTokens | None:
    """Of each segment what stands from its first predictor on, ``predictor_index`` [N] being all;
    None where that is nearly the whole row."""
    return layout.derived(_wanted_tokens, predictor_index)


def _wanted_tokens(layout: SegmentLayout, predictor_index: Tensor) -> WantedTokens | None:
    starts, lengths, _ = np.array(layout.segments).T
    ends = starts + lengths
    predictors = predictor_index.cpu().numpy()
    first = ends.copy()
    np.minimum.at(first, np.searchsorted(ends, predictors, side="right"), predictors)
    left_out = first - starts
    left_out[left_out < SHORTEST] = 0
    if not len(predictors) or left_out.sum() < LEAST_SHARE * layout.num_tokens:
        return None
    is_wanted = np.ones(layout.num_tokens, dtype=bool)
    for start, length in zip(starts, left_out, strict=True):
        is_wanted[start : start + length] = False
    places = np.cumsum(is_wanted)[predictors] - 1

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(predictor_index.device)

    return WantedTokens(
        on_device(np.flatnonzero(is_wanted)),
        on_device(np.flatnonzero(~is_wanted)),
        SegmentLayout(layout.segments, left_out.tolist()),
        on_device(places),
    )


def gather_predictors(hidden: Tensor, index: Tensor, wanted: WantedTokens | None) -> Tensor:
    """[N, H] of ``hidden``, the row's [T, H], or with ``wanted`` these tokens' [W, H]; ``index``
    [N] is the predictors' in the row."""
    return gather_tokens(hidden, index if wanted is None else wanted.predictors)


def narrow_last_layer(model: PreTrainedModel) -> bool:
    """Has the last decoder layer take ``wanted``, a ``WantedTokens``, and give these tokens' hidden
    states, [1, W, H]. False: it finds none. Whether the model bears it, ``row_check`` finds out.
    """
    layers = decoder_layers(model)
    if not layers:
        return False
    forward = layers[-1].forward
    if getattr(forward, "func", None) is not _narrowed:
        setattr(layers[-1], "forward", partial(_narrowed, forward))  # noqa: B010
    return True


def _narrowed(
    forward: Callable[..., Tensor],
    hidden: Tensor,
    *args: Any,
    wanted: WantedTokens | None = None,
    **kwargs: Any,
) -> Tensor:
    """``forward`` is the layer's, of ``hidden`` [1, T, H]: once on the others until their keys and
    values are there, once on the wanted tokens, whose attention is given them."""
    if wanted is None:
        return forward(hidden, *args, **kwargs)

    def at(positions: Tensor, **added: Any) -> Tensor:
        chosen = partial(_chosen, positions=positions, num_tokens=hidden.shape[1])
        own = gather_tokens(hidden[0], positions)[None]
        named = {name: chosen(value) for name, value in kwargs.items()}
        return forward(own, *map(chosen, args), **named, **added)

    others = StatesOfOthers()
    with suppress(_AllThere):
        at(wanted.others, others=others)
    return at(wanted.positions, others=others, wanted=wanted)


def _chosen(value: Any, positions: Tensor, num_tokens: int) -> Any:
    """What a layer is given for each token, as positions or rotations [1, T, ...], for some."""
    if isinstance(value, tuple):
        return tuple(_chosen(each, positions, num_tokens) for each in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, num_tokens):
        return value.index_select(1, positions)
    return value


def attend_from_wanted(
    attention: CheckedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    others: StatesOfOthers,
    wanted: WantedTokens,
    scale: float | None,
) -> Tensor:
    """[1, heads, W, D] of the wanted tokens' ``query``, ``key`` and ``value``, which are that too,
    with the others' keys and values."""
    assert others.key is not None and others.value is not None, "its layer has no attention of ours"

    def row(own: Tensor) -> Tensor:
        num_tokens = len(wanted.positions) + len(wanted.others)
        whole = own.new_zeros(*own.shape[:2], num_tokens, own.shape[3])
        return whole.index_copy(2, wanted.positions, own)

    keys = row(key).index_copy(2, wanted.others, others.key)
    values = row(value).index_copy(2, wanted.others, others.value)
    output = attention(row(query), keys, values, wanted.layout, scale)
    return output.index_select(2, wanted.positions)
