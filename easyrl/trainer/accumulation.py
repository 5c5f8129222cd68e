"""One update's groups, from the producer's stream into accumulated gradients (paper §4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from easyrl.engines.base import NonFiniteLossError
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.event_log import Record
from easyrl.runtime.collectives import Agreement
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import FinishedSamples, Key, MicroBatch, RolloutGroup
from easyrl.trainer.look_ahead import LookAhead, OpenGroups

if TYPE_CHECKING:
    from easyrl.engines.base import TrainEngine


class GroupSource(Protocol):
    """The groups of one update (``JournalledStream``)."""

    @property
    def wait_s(self) -> float: ...
    @property
    def load_s(self) -> float:
        """Reading groups back that had to wait on disk."""

    @property
    def first_group_wait_s(self) -> float | None: ...
    @property
    def accepted_versions(self) -> frozenset[str]:
        """Names of the weights that may have made the samples."""

    @property
    def recovered(self) -> Collection[Key]:
        """Finished in an earlier attempt of the run."""

    @property
    def open_samples(self) -> OpenGroups:
        """Finished responses of groups that are not complete."""

    def drain_ready(
        self, max_tokens: int, idle: Callable[[], bool] | None = None
    ) -> list[RolloutGroup]: ...
    def note_ahead(self, piece: Sequence[FinishedSamples]) -> None:
        """Keeps what was computed ahead, in this order, for another attempt of the run."""

    def ahead_of_drain(self, max_tokens: int) -> Iterable[Sequence[FinishedSamples]]:
        """What an earlier attempt had computed ahead before it took what comes next."""
        ...

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupFunctions:
    """The objective's pure functions of finished groups."""

    advantages: Callable[[RolloutGroup], np.ndarray]  # float32 [G]
    pack: Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]
    denominator: Callable[[Sequence[RolloutGroup]], float]  # late scalar, DESIGN §2.4
    dummy: Callable[[], MicroBatch]  # without weight, for a rank that has run out of work


class OnPolicyViolation(RuntimeError):
    """A sample was not made by the weights being trained; it is refused."""


@dataclass(frozen=True)
class Accumulator:
    """Runs forward and backward for each micro-batch as its groups arrive.

    Args:
        stop: asks for the end, also while groups are waited for.
        is_interruption: whether an error ends the batch on all ranks without anything being wrong
            with the weights: an outage, a stop.
        max_tokens: packed tokens per micro-batch.
        synchronous: wait for all groups before training (``mode: sync``).
        rows_per_drain: of groups that are ready, so many micro-batches' worth are packed together:
            fuller rows, of more even cost.
        look_ahead: while no group is complete, run the frozen models on responses that are
            finished; for an engine that can.
    """

    engine: TrainEngine
    agreement: Agreement
    functions: GroupFunctions
    stop: StopRequest
    is_interruption: Callable[[Exception], bool]
    record: Record
    max_tokens: int
    synchronous: bool
    rows_per_drain: int = 1
    look_ahead: bool = False

    def accumulate(self, groups: GroupSource) -> BatchTotals:
        """Sums of this rank. ``interruption`` in them says why they end early.

        Raises ``OnPolicyViolation``.
        """
        with self.stop.wakes(groups.interrupt):
            return self._accumulate(groups)

    def _accumulate(self, groups: GroupSource) -> BatchTotals:
        totals = BatchTotals()
        ahead = self._ahead_of(groups)
        work = self._micro_batches(groups, totals, ahead)
        if self.engine.lockstep:
            work = self.agreement.in_lockstep(work, self.functions.dummy)
        for micro_batch in work:
            self.record("micro_batch_start", num_tokens=micro_batch.num_tokens)
            start = time.monotonic()
            if ahead is not None:
                micro_batch = ahead.complete(micro_batch)
            try:
                for sums in self.engine.forward_backward([micro_batch]):
                    totals.metrics.add(sums)
            except NonFiniteLossError as error:
                # The gradient is NaN now, so every rank will skip the step; the batch goes on.
                self.record("non_finite_loss", problem=str(error))
            totals.train_s += time.monotonic() - start
            if not micro_batch.is_dummy:
                totals.num_packed_tokens += micro_batch.num_tokens
                totals.num_micro_batches += 1
            self.record("micro_batch_end")
        if ahead is not None:
            totals.look_ahead_s = ahead.work_s
            totals.num_look_ahead_tokens = ahead.num_tokens
        totals.wait_s = groups.wait_s
        totals.first_group_wait_s = groups.first_group_wait_s or 0.0  # a rank may have no prompt
        return totals

    def _ahead_of(self, groups: GroupSource) -> LookAhead | None:
        if not self.look_ahead or not self.engine.has_frozen_models:
            return None
        return LookAhead(
            self.engine,
            self.functions.pack,
            groups.open_samples,
            max_tokens=self.max_tokens,
            record=self.record,
            note=groups.note_ahead,
        )

    def _micro_batches(
        self, groups: GroupSource, totals: BatchTotals, ahead: LookAhead | None
    ) -> Iterator[MicroBatch]:
        """Packed rows as groups arrive; ends early, noting it in ``totals``, when interrupted."""
        functions = self.functions
        try:
            if self.synchronous:
                self.record("waiting_for_batch")
                groups.complete()
            while ready := self._take(groups, ahead):
                self.stop.raise_if_requested()
                for group in ready:
                    _refuse_off_policy(group, groups.accepted_versions)
                    totals.add_group(group, recovered=group.prompt.key in groups.recovered)
                totals.denominator += functions.denominator(ready)
                for row in functions.pack(ready, [functions.advantages(g) for g in ready]):
                    self.stop.raise_if_requested()
                    yield row
        except Exception as error:
            if not self.is_interruption(error):
                raise
            totals.interruption = error

    def _take(self, groups: GroupSource, ahead: LookAhead | None) -> list[RolloutGroup]:
        """Groups that are ready, after what an earlier attempt computed ahead of them."""
        max_tokens = self.rows_per_drain * self.max_tokens
        if ahead is None:
            return groups.drain_ready(max_tokens)
        for piece in groups.ahead_of_drain(max_tokens):
            self.stop.raise_if_requested()
            ahead.repeat(piece)
        return groups.drain_ready(max_tokens, ahead.work)


def _refuse_off_policy(group: RolloutGroup, accepted: frozenset[str]) -> None:
    for completion in group.completions:
        for span in completion.version_spans:
            if span.version not in accepted:
                raise OnPolicyViolation(
                    f"endpoint {completion.endpoint} stamped version {span.version!r} on "
                    f"prompt {group.prompt.index} of epoch {group.prompt.epoch}; training "
                    f"{' or '.join(sorted(accepted))!r}"
                )
