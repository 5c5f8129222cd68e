"""What an idle trainer does: it runs the frozen models on responses whose group is not complete.

They do not change while a batch is open, and a token's log-probability depends on the tokens before
it alone: computed early it is the same up to rounding, as rows of another shape are summed in
another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from easyrl.engines.base import TrainEngine
from easyrl.metrics.event_log import Record
from easyrl.schema import (
    FinishedSamples,
    FrozenLogprobs,
    Key,
    MicroBatch,
    OpenGroup,
    RolloutGroup,
    SampleKey,
)
from easyrl.trainer.row_split import join_logprobs, restrict, split, split_logprobs

# A piece of work repeats its prompts, unless their groups' last responses are in it. At least this
# share of its tokens must save work later: it then pays if three quarters of it fall into time in
# which the trainer would have waited, and a trainer that waits at all mostly waits for long.
MIN_USEFUL = 0.25

CPU = torch.device("cpu")
Piece = Sequence[FinishedSamples]  # what goes through the models together
Pack = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]


class OpenGroups(Protocol):
    """Finished responses of groups that are not complete (``OpenSamples``)."""

    def groups(self) -> list[OpenGroup]: ...
    def take(self, key: Key, max_tokens: int) -> FinishedSamples | None: ...


@dataclass
class LookAhead:
    """Log-probabilities of the frozen models for one update's groups, before these are complete.

    One object for each update, whose old policy is not that of the next. Belongs to the trainer's
    thread.

    Which responses are computed ahead, in which pieces, is a matter of the clock and decides the
    last bits of what the models say of them. A piece alone is a function of its responses: who
    ``notes`` the pieces can have them repeated before the same groups are trained, with equal bits.
    """

    engine: TrainEngine  # one that ``can_look_ahead``
    pack: Pack  # makes rows of responses, whether their group is complete or not
    open_groups: OpenGroups
    max_tokens: int  # packed, of one piece of work
    record: Record  # receives the events ``look_ahead_start`` and ``look_ahead_end``
    note: Callable[[Piece], object]  # told of each piece before the groups that use it are taken
    work_s: float = 0.0  # that the frozen models ran
    num_tokens: int = 0  # trained ones that had been computed ahead when their row came

    def __post_init__(self) -> None:
        # Of each response its trained tokens, int64 [N], and what is said of them, on the host.
        self._known: dict[SampleKey, tuple[Tensor, FrozenLogprobs]] = {}

    def work(self) -> bool:
        """Runs the frozen models on finished responses once; False if none are worth it."""
        chosen = self._choose()
        self.run(chosen)
        return bool(chosen)

    def run(self, piece: Piece) -> None:
        """Runs the frozen models on ``piece``: one of ``work``, or of an earlier attempt's."""
        start = time.monotonic()
        rows = self._rows(piece)
        for row in rows:
            self.record("look_ahead_start", num_tokens=row.num_tokens)
            # The copy waits for the device: a group may be complete when the work is done.
            said = split_logprobs(row, self.engine.frozen_logprobs(row).to(CPU))
            labels = split(row, row.label_ids)
            self._known |= {key: (labels[key], frozen) for key, frozen in said.items()}
            self.record("look_ahead_end")
        if rows:
            self.note(piece)
        self.work_s += time.monotonic() - start

    def complete(self, row: MicroBatch) -> MicroBatch:
        """``row`` with what the frozen models say of it, if some of it is known.

        What is not known of it is computed on a row of its own. What is known is then forgotten.
        Raises ``RuntimeError`` if it is known of another response of the same name.
        """
        if row.is_dummy:  # its sequence is nobody's
            return row
        known = {key: self._known.pop(key) for key in row.sequences if key in self._known}
        if not known:
            return row
        labels, parts = split(row, row.label_ids), {}
        for key, (label_ids, parts[key]) in known.items():
            if not torch.equal(label_ids, labels[key]):
                raise RuntimeError(f"what was computed ahead for {key} is of another response")
        missing = [key for key in row.sequences if key not in parts]
        self.num_tokens += row.num_loss_tokens
        if missing:
            rest = restrict(row, missing)
            self.num_tokens -= rest.num_loss_tokens
            parts |= split_logprobs(rest, self.engine.frozen_logprobs(rest).to(CPU))
        return replace(row, frozen=join_logprobs(row, parts))

    def _choose(self) -> list[FinishedSamples]:
        """Responses for one row, from the groups that waste least first."""
        room = self.max_tokens
        chosen = []
        groups = self.open_groups.groups()
        groups.sort(key=lambda g: (_useful(g, self.max_tokens), sum(g.finished)), reverse=True)
        for group in groups:
            if _useful(group, room) < MIN_USEFUL:
                continue
            samples = self.open_groups.take(group.key, room - group.num_prompt_tokens)
            if samples is not None:
                chosen.append(samples)
                lengths = [len(c.token_ids) for c in samples.completions.values()]
                room -= group.num_prompt_tokens + sum(lengths)
        return chosen

    def _rows(self, chosen: Piece) -> list[MicroBatch]:
        """Packed as if they were whole groups; none where no token of theirs is trained."""
        numbers = {samples.prompt.key: list(samples.completions) for samples in chosen}
        rows = self.pack(
            [RolloutGroup(s.prompt, tuple(s.completions.values()), (), "", 0, 0) for s in chosen]
        )

        def of_whole_group(key: SampleKey) -> SampleKey:
            return key._replace(sample=numbers[key.epoch, key.prompt][key.sample])

        return [replace(row, sequences=tuple(map(of_whole_group, row.sequences))) for row in rows]


def _useful(group: OpenGroup, room: int) -> float:
    """The share of the tokens that need not go through the models again, of what fits."""
    fitting = group.within(room - group.num_prompt_tokens)
    response_tokens = sum(group.finished[place] for place in fitting)
    if response_tokens == 0:
        return 0.0
    if group.num_missing == 0 and len(fitting) == len(group.finished):
        return 1.0  # the prompt is not needed again either
    return response_tokens / (response_tokens + group.num_prompt_tokens)
