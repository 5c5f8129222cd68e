"""Packing plans in which nothing is shared: the prompt goes through the model once per response.

What shared-prompt rows are compared with, and the way of models whose attention cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easyrl.dataloaders.packing.plans import PromptRows, Rows


class UnsharedRows(PromptRows):
    """Whole sequences behind each other; a group stays in one row where it fits into one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts = np.zeros_like(self.lengths)  # leading tokens that a group shares


class PaddedRows(UnsharedRows):
    """Sequences that become a batch, padded to the longest: a row takes their number times that.

    Sequences of similar length are put together: whole groups with ``whole_groups``, and where the
    order of groups is kept, only those that follow each other.
    """

    def rows(self, keep_order: bool) -> Rows:
        if keep_order:
            parts = [part for members in self.groups for part in self.parts(members)]
        elif self.whole_groups:
            parts = sorted((list(g) for g in self.groups), key=self._longest, reverse=True)
        else:
            return sorted(self._stretches(range(len(self.sequences))))
        rows: Rows = []
        for part in parts:
            if rows and self._num_tokens(rows[-1] + part) <= self.budget:
                rows[-1] += part
            else:
                rows.append(list(part))
        return sorted(sorted(row) for row in rows)

    def parts(self, group: Sequence[int]) -> Rows:
        if self.whole_groups or self._num_tokens(group) <= self.budget:
            return [list(group)]
        return self._stretches(group)

    def _stretches(self, members: Sequence[int]) -> Rows:
        """As few rows as sequences by falling length allow."""
        rows: Rows = []
        for index in sorted(members, key=lambda i: (-self.lengths[i], i)):
            if rows and (len(rows[-1]) + 1) * self.lengths[rows[-1][0]] <= self.budget:
                rows[-1].append(index)
            else:
                rows.append([index])
        return [sorted(row) for row in rows]

    def _num_tokens(self, row: Sequence[int]) -> int:
        return len(row) * self._longest(row)

    def _longest(self, row: Sequence[int]) -> int:
        return int(self.lengths[list(row)].max())
