"""What an idle trainer does: it runs the frozen models on responses whose group is not complete.

What they say is kept in ``model_outputs.py`` until the packed row comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from easyrl.metrics.event_log import Record
from easyrl.schema import (
    FinishedSamples,
    Key,
    MicroBatch,
    OpenGroup,
    RolloutGroup,
    SampleKey,
)
from easyrl.trainer.model_outputs import ModelOutputs

# A piece of work repeats its prompts, unless their groups' last responses are in it. At least this
# share of its tokens must save work later: it then pays if three quarters of it fall into time in
# which the trainer would have waited, and a trainer that waits at all mostly waits for long.
MIN_USEFUL = 0.25

Piece = Sequence[FinishedSamples]  # what goes through the models together
Pack = Callable[[Sequence[RolloutGroup]], list[MicroBatch]]


class OpenGroups(Protocol):
    """Finished responses of groups that are not complete (``OpenSamples``)."""

    def groups(self) -> list[OpenGroup]: ...
    def take(self, key: Key, max_tokens: int) -> FinishedSamples | None: ...


@dataclass
class LookAhead:
    """Runs the frozen models on one update's responses before their groups are complete.

    One object for each update. Belongs to the trainer's thread.

    Which responses are computed ahead, in which pieces, is a matter of the clock and decides the
    last bits of what the models say of them. A piece alone is a function of its responses: who
    ``notes`` the pieces can have them repeated before the same groups are trained, with equal bits.
    """

    outputs: ModelOutputs  # of an engine that ``can_look_ahead``
    pack: Pack  # makes rows of responses, whether their group is complete or not
    open_groups: OpenGroups
    max_tokens: int  # packed, of one piece of work
    record: Record  # receives the events ``look_ahead_start`` and ``look_ahead_end``
    note: Callable[[Piece], object]  # told of each piece before the groups that use it are taken
    work_s: float = 0.0  # that the frozen models ran

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
            self.outputs.run([row], ahead=True)
            self.record("look_ahead_end")
        if rows:
            self.note(piece)
        self.work_s += time.monotonic() - start

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
