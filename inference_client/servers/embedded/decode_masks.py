"""What a decode step's attention leaves out: unwritten positions, and those behind a window.

Shape legend: B running sequences, L positions of the longest slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names of kinds of layers


@dataclass(frozen=True, slots=True)
class DecodeMasks:
    """Masks for the layers of a model: all see every position, or all or some only a window."""

    window: int | None = None  # positions that a sliding layer sees, the newest token's among them
    by_kind: bool = False  # the model takes one for each kind of layer, by the kind's name

    @classmethod
    def of(cls, config: dict[str, Any], max_model_len: int) -> DecodeMasks:
        """By a model's configuration; a window that nothing is longer than is none.

        Raises ``ValueError`` for layers of another kind.
        """
        kinds = set(config.get("layer_types") or ())
        if others := kinds - {FULL, SLIDING}:
            raise ValueError(f"layers with {', '.join(sorted(others))}")
        window: int | None = config.get("sliding_window")
        if config.get("use_sliding_window") is False or kinds == {FULL}:
            window = None
        if window is None or window >= max_model_len:
            return cls()
        return cls(window, by_kind=kinds == {FULL, SLIDING})

    def of_step(
        self, zero: Tensor, unwritten: Tensor, positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Added to scores: [B, 1, 1, L] of the dtype of ``zero`` [], for each kind if they differ.

        Args:
            unwritten: bool [B, L], behind the newest token of each sequence.
            positions: int64 [B], of the newest tokens.
        """
        full = zero.masked_fill(unwritten, -torch.inf)[:, None, None]
        if self.window is None:
            return full
        columns = torch.arange(unwritten.shape[1], device=positions.device)
        behind = columns <= positions[:, None] - self.window
        sliding = full.masked_fill(behind[:, None, None], -torch.inf)
        return {FULL: full, SLIDING: sliding} if self.by_kind else sliding
