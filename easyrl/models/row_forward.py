"""How a model sees a row: packed, through our attention, or as a padded batch through its own.

Policy, critic and teacher run either way; which one, ``model.attention`` says.

Shape legend: T tokens of a row, S its segments, L tokens of the longest, N wanted positions, H
hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.path_gather import gather_tokens
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.last_layer import (
    StatesOfOthers,
    WantedTokens,
    attend_from_wanted,
    gather_predictors,
    wanted_tokens,
)

ATTENTION = "easyrl_shared_prompt"
OWN_ATTENTION = "own"  # model.attention: the model's


class RowForward(Protocol):
    """One forward of a model over a row."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        index: Tensor,
    ) -> Tensor:
        """Hidden states [N, H] of the last layer at the positions ``index`` [N] of the row.

        ``input_ids`` and ``position_ids`` int64 [T] are the row, ``layout`` its segments.
        """
        ...


def row_forward(attention: str, narrow: bool = False) -> RowForward:
    """By ``model.attention``; ``narrow`` is that of ``PackedForward``."""
    if attention == OWN_ATTENTION:
        return PaddedForward()
    return PackedForward(CheckedAttention(attention), narrow)


class PackedForward:
    """The row as it is, one sequence of T tokens; the model has to be loaded with ``ATTENTION``.

    ``narrow``: its last layer was given to ``narrow_last_layer``.
    """

    def __init__(self, attention: CheckedAttention, narrow: bool = False) -> None:
        self.attention = attention
        self._narrow = narrow

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        index: Tensor,
    ) -> Tensor:
        wanted = self.wanted(model, layout, index)
        hidden = model.base_model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            layout=layout,
            checked_attention=self.attention,
            wanted=wanted,
        ).last_hidden_state[0]  # [T, H], or of the wanted tokens
        return gather_predictors(hidden, index, wanted)

    def wanted(
        self, model: PreTrainedModel, layout: SegmentLayout, index: Tensor
    ) -> WantedTokens | None:
        """The tokens that the last layer is computed for; None: all.

        Under ZeRO-3 all: its hooks of a module want to see the end of what they saw begin.
        """
        if not self._narrow or hasattr(next(model.parameters()), "ds_id"):
            return None
        return wanted_tokens(layout, index)


class PaddedForward:
    """The row's segments, which share nothing, as a batch [S, L] with padding on the right.

    A causal model's tokens see nothing behind them, so there is no mask: positions and attention
    are what the model makes of a batch by itself.
    """

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SegmentLayout,
        index: Tensor,
    ) -> Tensor:
        places, num_rows, longest = layout.derived(_padded_places, input_ids.device)
        padded = input_ids.new_zeros(num_rows * longest)
        padded[places] = input_ids
        hidden = model.base_model(
            input_ids=padded.view(num_rows, longest), use_cache=False
        ).last_hidden_state
        return gather_tokens(hidden.flatten(0, 1), places[index])


def _padded_places(layout: SegmentLayout, device: torch.device) -> tuple[Tensor, int, int]:
    """Of each of the row's tokens in the flattened batch, int64 [T]; S and L."""
    if any(parent >= 0 for _, _, parent in layout.segments):
        raise ValueError(
            "a row with shared beginnings cannot go through a model's own attention; set "
            "trainer.packing=none"
        )
    lengths = [length for _, length, _ in layout.segments]
    longest = max(lengths)
    places = [torch.arange(n) + row * longest for row, n in enumerate(lengths)]
    return torch.cat(places).to(device), len(lengths), longest


class NotPacked(ValueError):
    """A model asks its attention for something that ours does not do on packed rows."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: SegmentLayout | None = None,
    checked_attention: CheckedAttention | None = None,
    sliding_window: int | None = None,
    wanted: WantedTokens | None = None,
    others: StatesOfOthers | None = None,
    **unknown: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; layout and attention come through the model's
    keywords, ``others`` from its last layer (``last_layer.py``).
    """
    if layout is None or checked_attention is None:
        raise NotPacked("its layers do not hand the row's layout to their attention")
    if attention_mask is not None:
        raise NotPacked("it makes attention masks of its own")
    if sliding_window is not None and sliding_window < max(layout.path_lengths):
        raise NotPacked(f"sequences are longer than its sliding window of {sliding_window} tokens")
    if asked := [name for name in NOT_HONOURED if unknown.get(name) is not None]:
        raise NotPacked(f"its attention has {NOT_HONOURED[asked[0]]}")
    if others is None:
        output = checked_attention(query, key, value, layout, scaling)
    elif wanted is None:
        others.keep(key, value)
    else:
        states = query, key, value
        output = attend_from_wanted(checked_attention, *states, others, wanted, scaling)
    return output.transpose(1, 2).contiguous(), None


# Keywords of transformers' attention functions that change what is computed.
NOT_HONOURED = {
    "softcap": "a soft cap on its scores",
    "s_aux": "sinks",
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
    "indexer_attn_mask": "an indexer's mask",
}


AttentionInterface.register(ATTENTION, _attention)
