"""What the frozen models say of one update's responses: kept from when they ran to the packed row.

They are the reference, the old policy, a teacher that scores sampled tokens and, with a critic, the
critic as the batch began. None of them changes while an update is open, and what they say of a
token depends on the tokens before it alone: computed early it is the same up to rounding, as rows
of another shape are summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl.engines.base import TrainEngine
from easyrl.episodes.branches import tokens_by_part
from easyrl.schema import (
    Completion,
    FrozenLogprobs,
    GroupOutputs,
    MicroBatch,
    RolloutGroup,
    SampleKey,
)
from easyrl.trainer.row_split import join_logprobs, restrict, split, split_logprobs

CPU = torch.device("cpu")


class _Said(NamedTuple):
    """Of one response, or a part of an episode."""

    label_ids: Tensor  # int64 [N], its trained tokens
    frozen: FrozenLogprobs  # on the host
    ahead: bool  # before its group was complete


@dataclass(frozen=True)
class ResponseRows:
    """The recipe's part of it."""

    # rows of the selected responses of groups, but for those that are known
    pack: Callable[[Sequence[RolloutGroup], Collection[SampleKey]], list[MicroBatch]]
    trained_tokens: Callable[[Completion], np.ndarray]  # bool [R]


class ModelOutputs:
    """One object for each update, whose old policy is not that of the next.

    Belongs to the trainer's thread.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.num_ahead_tokens = 0  # trained ones that were known ahead when their row came
        self._engine = engine
        self._known: dict[SampleKey, _Said] = {}

    def run(self, rows: Sequence[MicroBatch], *, ahead: bool = False) -> None:
        """Runs the models on ``rows``; of an offloaded one the weights travel once for all."""
        for row in self._engine.prepare(rows):
            frozen = row.frozen or self._engine.frozen_logprobs(row)
            # The copy waits for the device: a group may be complete when the work is done.
            said = split_logprobs(row, frozen.to(CPU))
            labels = split(row, row.label_ids)
            self._known |= {key: _Said(labels[key], own, ahead) for key, own in said.items()}

    def of_groups(self, groups: Sequence[RolloutGroup], rows: ResponseRows) -> list[GroupOutputs]:
        """What the models say of the selected responses of ``groups``; what is not known is run."""
        self.run(rows.pack(groups, self._known.keys()))
        return [self._of_group(group, rows.trained_tokens) for group in groups]

    def complete(self, row: MicroBatch) -> MicroBatch:
        """``row`` with what the models say of it, if some of it is known.

        What is not known of it is computed on a row of its own. What is known is then forgotten.
        Raises ``RuntimeError`` if it is known of another response of the same name.
        """
        if row.is_dummy:  # its sequence is nobody's
            return row
        known = {key: self._known.pop(key) for key in row.sequences if key in self._known}
        if not known:
            return row
        labels, parts = split(row, row.label_ids), {}
        for key, said in known.items():
            if not torch.equal(said.label_ids, labels[key]):
                raise RuntimeError(f"what was computed ahead for {key} is of another response")
            parts[key] = said.frozen
            self.num_ahead_tokens += len(said.label_ids) if said.ahead else 0
        missing = [key for key in row.sequences if key not in parts]
        if missing:
            rest = restrict(row, missing)
            parts |= split_logprobs(rest, self._engine.frozen_logprobs(rest).to(CPU))
        return replace(row, frozen=join_logprobs(row, parts))

    def _of_group(
        self, group: RolloutGroup, trained_tokens: Callable[[Completion], np.ndarray]
    ) -> GroupOutputs:
        values: list[np.ndarray] = []
        reference: list[np.ndarray] = []
        for sample, completion in enumerate(group.completions):
            own = np.zeros(len(completion.token_ids), np.float32)
            of_reference = own.copy()
            tokens = np.flatnonzero(trained_tokens(completion))
            for part, chosen in tokens_by_part(completion, tokens).items():
                said = self._known.get(SampleKey(*group.prompt.key, sample, part))
                if said is not None:
                    _place(own, tokens[chosen], said.frozen.values)
                    _place(of_reference, tokens[chosen], said.frozen.reference)
            values.append(own)
            reference.append(of_reference)
        return GroupOutputs(tuple(values), tuple(reference))


def _place(values: np.ndarray, places: np.ndarray, said: Tensor | None) -> None:
    """Writes ``said`` [n] to ``places`` int64 [n] of ``values`` float32 [R]."""
    if said is not None:
        values[places] = said.numpy()
