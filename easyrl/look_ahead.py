"""What an idle trainer does: it runs the frozen models on responses whose group is not complete.

Reference and old policy do not change while a batch is open, and a token's log-probability depends
on the tokens before it alone. So what they say of a finished response can be computed before its
group is there, and is the same up to rounding: rows of another shape are summed in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from easyrl.event_log import Record
from easyrl.row_parts import join_logprobs, restrict, split_logprobs
from easyrl.schema import (
    FinishedSamples,
    FrozenLogprobs,
    Key,
    MicroBatch,
    OpenGroup,
    RolloutGroup,
    SampleKey,
)

if TYPE_CHECKING:
    from easyrl.engines.base import TrainEngine

# A piece of work repeats its prompts, unless their groups' last responses are in it. At least this
# share of its tokens must save work later: it then pays if three quarters of it fall into time in
# which the trainer would have waited, and a trainer that waits at all mostly waits for long.
MIN_USEFUL = 0.25

CPU = torch.device("cpu")
Pack = Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]


class OpenGroups(Protocol):
    """Finished responses of groups that are not complete (``OpenSamples``)."""

    def groups(self) -> list[OpenGroup]: ...
    def take(self, key: Key, max_tokens: int) -> FinishedSamples | None: ...


class LookAhead:
    """Log-probabilities of the frozen models for one update's groups, before these are complete.

    One object for each update: its old policy is not that of the next, and nothing of an earlier
    update or batch can be met in it. Belongs to the trainer's thread.

    Args:
        engine: one that ``can_look_ahead``.
        pack: the objective's, that makes rows of groups.
        max_tokens: packed tokens of one piece of work.
        record: receives the events ``look_ahead_start`` and ``look_ahead_end``.

    Attributes:
        work_s: seconds spent in ``work``.
        num_tokens: trained tokens that were computed ahead when their row came.
    """

    def __init__(
        self,
        engine: TrainEngine,
        pack: Pack,
        open_groups: OpenGroups,
        *,
        max_tokens: int,
        record: Record,
    ) -> None:
        self._engine = engine
        self._pack = pack
        self._open_groups = open_groups
        self._max_tokens = max_tokens
        self._record = record
        self._known: dict[SampleKey, FrozenLogprobs] = {}  # in host memory
        self._device = CPU  # the engine's
        self._has_frozen = True  # False: the old policy is the policy and there is no reference
        self.work_s = 0.0
        self.num_tokens = 0

    def work(self) -> bool:
        """Runs the frozen models on finished responses once; False if none are worth it."""
        if not self._has_frozen:
            return False
        start = time.monotonic()
        chosen = self._choose()
        for row in self._rows(chosen):
            self._record("look_ahead_start", num_tokens=row.num_tokens)
            frozen = self._engine.frozen_logprobs(row)
            self._has_frozen = frozen.reference is not None or frozen.old_policy is not None
            if self._has_frozen:
                # The copy waits for the device, so that this returns when the work is done and not
                # when it is launched: a group may be complete by then.
                self._known |= split_logprobs(row, self._on_host(frozen))
            self._record("look_ahead_end")
        self.work_s += time.monotonic() - start
        return bool(chosen) and self._has_frozen

    def complete(self, row: MicroBatch) -> MicroBatch:
        """``row`` with what the frozen models say of it, if some of it is known.

        What is not known of it is computed on a row of its own. What is known is then forgotten.
        """
        if row.is_dummy:  # its sequence is nobody's
            return row
        parts = {key: self._known.pop(key) for key in row.sequences if key in self._known}
        if not parts:
            return row
        missing = [key for key in row.sequences if key not in parts]
        self.num_tokens += row.num_loss_tokens
        if missing:
            rest = restrict(row, missing)
            self.num_tokens -= rest.num_loss_tokens
            parts |= split_logprobs(rest, self._on_host(self._engine.frozen_logprobs(rest)))
        return replace(row, frozen=_moved(join_logprobs(row, parts), self._device))

    def _choose(self) -> list[FinishedSamples]:
        """Responses for one row, from the groups that waste least first."""
        room = self._max_tokens
        chosen = []
        for group in sorted(
            self._open_groups.groups(),
            key=lambda group: (_useful(group, self._max_tokens), group.num_finished_tokens),
            reverse=True,
        ):
            if _useful(group, room) < MIN_USEFUL:
                continue
            samples = self._open_groups.take(group.key, room - group.num_prompt_tokens)
            if samples is not None:
                chosen.append(samples)
                lengths = [len(c.token_ids) for c in samples.completions.values()]
                room -= group.num_prompt_tokens + sum(lengths)
        return chosen

    def _rows(self, chosen: Sequence[FinishedSamples]) -> list[MicroBatch]:
        """Packed as groups are; none where no token of theirs is trained."""
        numbers = {samples.prompt.key: list(samples.completions) for samples in chosen}
        rows = self._pack(
            [_group_of(samples) for samples in chosen],
            [np.zeros(len(samples.completions), np.float32) for samples in chosen],
        )

        def of_whole_group(key: SampleKey) -> SampleKey:
            return key._replace(sample=numbers[key.epoch, key.prompt][key.sample])

        return [replace(row, sequences=tuple(map(of_whole_group, row.sequences))) for row in rows]

    def _on_host(self, frozen: FrozenLogprobs) -> FrozenLogprobs:
        for logprobs in (frozen.reference, frozen.old_policy):
            if logprobs is not None:
                self._device = logprobs.device
        return _moved(frozen, CPU)


def _useful(group: OpenGroup, room: int) -> float:
    """The share of the tokens of a piece of work that need not go through the models again."""
    response_tokens = min(group.num_finished_tokens, room - group.num_prompt_tokens)
    if response_tokens <= 0:
        return 0.0
    if group.num_missing == 0 and response_tokens == group.num_finished_tokens:
        return 1.0  # the prompt is not needed again either
    return response_tokens / (response_tokens + group.num_prompt_tokens)


def _group_of(samples: FinishedSamples) -> RolloutGroup:
    """As if the finished responses were the whole group."""
    return RolloutGroup(
        prompt=samples.prompt,
        completions=tuple(samples.completions.values()),
        scores=(),
        policy_version="",
        dispatched_s=0.0,
        completed_s=0.0,
    )


def _moved(frozen: FrozenLogprobs, device: torch.device) -> FrozenLogprobs:
    reference, old_policy = frozen.reference, frozen.old_policy
    return FrozenLogprobs(
        reference=None if reference is None else reference.to(device),
        old_policy=None if old_policy is None else old_policy.to(device),
    )
