"""One update's groups, from the producer's stream into accumulated gradients (paper §4.3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, Protocol

import numpy as np
import torch

from easyrl.engines.base import MetricSums, NonFiniteLossError, TrainEngine
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.event_log import Record
from easyrl.metrics.logprob_agreement import agreement, disagreements
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.device_time import DeviceTimer
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.samples.choice import ChosenGroups
from easyrl.schema import (
    NOTHING_SAID,
    EndpointAgreement,
    EndpointsDisagree,
    FinishedSamples,
    GroupOutputs,
    Key,
    MicroBatch,
    RolloutGroup,
    TrainedGroup,
)
from easyrl.trainer.group_preparation import GroupPreparation, PreparedGroup
from easyrl.trainer.look_ahead import LookAhead, OpenGroups
from easyrl.trainer.model_outputs import ModelOutputs, ResponseRows


class GroupSource(Protocol):
    """The groups of one update (``GroupStream``)."""

    # is told of each group in memory as it arrives, while ``drain_ready`` waits for more
    on_arrival: Callable[[RolloutGroup], object]

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
    def note_trained(self, num_tokens: int) -> None:
        """Rows of so many packed tokens of what was drained were trained."""

    def note_ahead(self, piece: Sequence[FinishedSamples]) -> None:
        """Keeps what was computed ahead, in this order, for another attempt of the run."""

    def ahead_of_drain(self, max_tokens: int) -> Iterable[Sequence[FinishedSamples]]:
        """What an earlier attempt had computed ahead before it took what comes next."""
        ...

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...


class PackRows(Protocol):
    """Makes packed rows, ``min_rows`` at least where there is something for each."""

    def __call__(
        self, groups: Sequence[TrainedGroup], /, *, min_rows: int = 1
    ) -> list[MicroBatch]: ...


@dataclass(frozen=True)
class GroupFunctions:
    """The recipe's pure functions of finished groups."""

    # of this rank's groups; for scope "batch" also ``batch_rewards`` of all ranks' in the step, and
    # where models are asked first, what they say of each of the groups
    trained: Callable[
        [Sequence[RolloutGroup], Sequence[np.ndarray], Sequence[GroupOutputs]], list[TrainedGroup]
    ]
    denominator: Callable[[Sequence[RolloutGroup]], float]  # late scalar, docs/recipes.md
    pack: PackRows
    pack_finished: Callable[[Sequence[RolloutGroup]], list[MicroBatch]]  # need not be complete
    dummy: Callable[[], MicroBatch]  # without weight, for a rank that has run out of work
    scored: Callable[[RolloutGroup], RolloutGroup] = lambda group: group  # scores to train with
    scope: Literal["group", "batch"] = "group"
    batch_rewards: Callable[[RolloutGroup, GroupOutputs], np.ndarray] = lambda group, said: (
        group.rewards
    )
    advantage_only: bool = False  # advantages of exactly zero: no loss, no gradient
    initial_controls: Mapping[str, float] = field(default_factory=dict)
    # of the next update, by those of one and what was measured in it
    next_controls: Callable[[Mapping[str, float], Mapping[str, float]], Mapping[str, float]] = (
        lambda controls, measured: controls
    )
    ask_first: ResponseRows | None = None  # advantages are made of what models say; None: are not
    # late scalar of the value loss; None: no critic
    value_denominator: Callable[[Sequence[RolloutGroup]], float] | None = None

    def trained_alone(self, group: RolloutGroup) -> TrainedGroup | None:
        """Of a group with the scores to train with; None where its advantages need the rewards of
        the whole batch, or what models say."""
        if self.scope == "batch" or self.ask_first is not None:
            return None
        return self.trained([group], (), [NOTHING_SAID])[0]


class OnPolicyViolation(RuntimeError):
    """A sample was not made by the weights being trained; it is refused."""


@dataclass(frozen=True)
class Accumulator:
    """Runs forward and backward for each micro-batch as its groups arrive."""

    engine: TrainEngine
    collectives: Collectives
    functions: GroupFunctions
    stop: StopRequest  # asks for the end, also while groups are waited for
    is_interruption: Callable[[Exception], bool]  # nothing is wrong with the weights: outage, stop
    record: Record
    max_tokens: int  # packed, per micro-batch
    synchronous: bool  # wait for all groups before training (``mode: sync``)
    # micro-batches' worth of ready groups that are packed together: fuller rows, of more even cost
    rows_per_drain: int = 1
    rows_at_once: int = 1  # micro-batches of one call of the engine: a pipeline overlaps them
    look_ahead: bool = False  # the frozen models run ahead while no group is complete
    # Told, where training begins before the last group is there, how many seconds of an update were
    # spent on training how many groups of this rank's.
    on_trained: Callable[[float, int], object] = lambda seconds, num_groups: None
    # of each endpoint's mean |Δ log-prob|, nats (metrics/logprob_agreement.py); None: not judged
    agreement_limit: float | None = None
    skip_without_signal: bool = True  # groups whose gradient is exactly zero are not run, but one
    # of each endpoint that nothing else is compared of
    samples_per_step: int = 0  # groups of an update that are kept to be looked at, of all ranks
    cores: SharedCores = field(default_factory=SharedCores)
    clock: PhaseClock = field(default_factory=PhaseClock)  # of the trainer's thread

    def accumulate(self, groups: GroupSource) -> BatchTotals:
        """Sums of this rank, up to an interruption. Raises ``OnPolicyViolation``."""
        totals = BatchTotals(samples=ChosenGroups(self.samples_per_step))
        timer = DeviceTimer.of(self.engine.device)
        outputs = ModelOutputs(self.engine)
        ahead = None
        if self.look_ahead and self.engine.has_frozen_models:
            ahead = LookAhead(
                outputs,
                self.functions.pack_finished,
                groups.open_samples,
                max_tokens=self.max_tokens,
                record=self.record,
                note=groups.note_ahead,
            )
        preparation = GroupPreparation(self.functions, groups.recovered, self.clock)
        work = self._micro_batches(groups, preparation, totals, outputs, ahead, timer)
        if self.engine.lockstep:
            work = self.collectives.in_lockstep(work, lambda: [self.functions.dummy()])
        groups.on_arrival = preparation.prepare
        with self.stop.wakes(groups.interrupt), self.cores.rests_behind():
            for rows in work:
                num_tokens = sum(row.num_tokens for row in rows)
                self.record("micro_batch_start", num_tokens=num_tokens)
                self.cores.take()
                with self._training(timer, num_tokens=num_tokens, num_rows=len(rows)):
                    self._add_metrics(totals, partial(self.engine.forward_backward, rows))
                if not rows[0].is_dummy:
                    totals.num_packed_tokens += num_tokens
                    totals.num_micro_batches += len(rows)
                    groups.note_trained(num_tokens)
                self.record("micro_batch_end")
            self.cores.take()
            with self._training(timer):
                self._add_metrics(totals, self.engine.finish_backwards)
        if ahead is not None:
            totals.look_ahead_s = ahead.work_s
            totals.num_look_ahead_tokens = outputs.num_ahead_tokens
        totals.train_s = timer.total_s()
        totals.wait_s = groups.wait_s
        totals.first_group_wait_s = groups.first_group_wait_s or 0.0  # a rank may have no prompt
        if not self.synchronous and self.functions.scope == "group":
            self.on_trained(totals.train_s, len(totals.groups))
        return totals

    @contextmanager
    def _training(self, timer: DeviceTimer, **args: int) -> Iterator[None]:
        with self.clock.phase("train", **args), timer.span():
            yield

    def _add_metrics(
        self, totals: BatchTotals, backward: Callable[[], Sequence[MetricSums]]
    ) -> None:
        try:
            for sums in backward():
                # of each token: kept of the responses alone that are shown
                totals.samples.compare(sums.responses)
                sums.responses.clear()
                totals.metrics.add(sums)
        except NonFiniteLossError as error:
            # The gradient is NaN now: every rank will skip the step; the batch goes on.
            self.record("non_finite_loss", problem=str(error))

    def judge(self, seen: Sequence[EndpointAgreement]) -> None:
        """Raises ``EndpointsDisagree`` if log-probabilities of endpoints are over the limit."""
        if problems := disagreements(seen, self.agreement_limit):
            raise EndpointsDisagree(problems)

    def _micro_batches(
        self,
        groups: GroupSource,
        preparation: GroupPreparation,
        totals: BatchTotals,
        outputs: ModelOutputs,
        ahead: LookAhead | None,
        timer: DeviceTimer,
    ) -> Iterator[list[MicroBatch]]:
        """Packed rows as groups arrive, up to ``rows_at_once`` where so many are ready; ends
        early, noting it in ``totals``, when interrupted."""
        compared: set[str] = set()  # endpoints
        try:
            if self.synchronous and self.functions.scope == "group":  # "batch" waits by itself
                self.record("waiting_for_batch")
                with self.clock.phase("wait"):
                    groups.complete()
            drains = self._drains(groups, preparation, totals, ahead, timer)
            for trained in self._trained(drains, partial(self._said, outputs, timer)):
                totals.samples.add(trained)
                to_run = self._to_run(trained, compared, totals)
                rows = self.functions.pack(to_run, min_rows=self._least_rows())
                with self._training(timer):
                    rows = self.engine.prepare([outputs.complete(row) for row in rows])
                while rows:
                    self.stop.raise_if_requested()
                    num_rows = self._rows_now()
                    now, rows = rows[:num_rows], rows[num_rows:]
                    yield now
                    self.judge(agreement(totals.metrics.compared))
        except Exception as error:
            if not self.is_interruption(error):
                raise
            totals.interruption = error

    def _rows_now(self) -> int:
        """Of the next call of the engine. Where cores are shared, as many as this process may train
        beside one another at the moment."""
        if self.rows_at_once == 1 or not self.cores:
            return self.rows_at_once
        self.cores.take()
        return min(torch.get_num_threads(), self.rows_at_once)

    def _least_rows(self) -> int:
        """One more than threads at the moment: a server that ends while a row is trained leaves a
        core, and a row that has begun keeps to its thread."""
        return min(self._rows_now() + 1, self.rows_at_once) if self.cores else 1

    def _trained(
        self,
        arriving: Iterable[list[PreparedGroup]],
        said: Callable[[Sequence[RolloutGroup]], list[GroupOutputs]],
    ) -> Iterator[list[TrainedGroup]]:
        """The groups of each drain; with scope ``batch`` once all rewards are there, collective."""
        if self.functions.scope == "group":
            for prepared in arriving:
                trained_alone = [each.trained for each in prepared if each.trained is not None]
                if len(trained_alone) == len(prepared):
                    yield trained_alone
                    continue
                usable = [each.group for each in prepared]
                yield self.functions.trained(usable, (), said(usable))
            return
        self.record("waiting_for_batch")
        drains: list[list[RolloutGroup]] = []
        outputs: list[GroupOutputs] = []
        interruption: Exception | None = None
        try:
            for prepared in arriving:  # models that are asked first run as groups arrive
                drains.append([each.group for each in prepared])
                outputs += said(drains[-1])
        except Exception as error:
            if not self.is_interruption(error):
                raise
            interruption = error  # told below, the other ranks wait there
        usable = [group for drain in drains for group in drain]
        mine = [
            (group.prompt.key, self.functions.batch_rewards(group, own).tolist())
            for group, own in zip(usable, outputs, strict=False)  # fewer where interrupted
        ]
        told = self.collectives.all_gather(None if interruption else mine)
        if interruption is not None:
            raise interruption
        if None in told:  # another rank's interruption ends the batch for all
            return
        pairs = sorted(pair for rank in told for pair in rank)
        rewards = [np.array(own, dtype=np.float64) for _, own in pairs]
        trained = iter(self.functions.trained(usable, rewards, outputs))
        for drain in drains:
            yield list(islice(trained, len(drain)))

    def _said(
        self, outputs: ModelOutputs, timer: DeviceTimer, groups: Sequence[RolloutGroup]
    ) -> list[GroupOutputs]:
        """What the recipe's advantages of ``groups`` ask models for."""
        if self.functions.ask_first is None:
            return [NOTHING_SAID] * len(groups)
        self.cores.take()
        with self._training(timer):
            return outputs.of_groups(groups, self.functions.ask_first)

    def _drains(
        self,
        groups: GroupSource,
        preparation: GroupPreparation,
        totals: BatchTotals,
        ahead: LookAhead | None,
        timer: DeviceTimer,
    ) -> Iterator[list[PreparedGroup]]:
        """Groups that are packed together, checked and counted."""
        max_tokens = self.rows_per_drain * self.max_tokens
        idle = None if ahead is None else partial(self._look_ahead, ahead)
        if timer.runs_behind:
            idle = partial(self._wait_for_device, timer, idle)
        while True:
            if ahead is not None:
                for piece in groups.ahead_of_drain(max_tokens):
                    self.stop.raise_if_requested()
                    with self.clock.phase("look_ahead"):
                        ahead.run(piece)
            self.cores.rest()  # while it waits; where it does not, for no time
            with self.clock.phase("wait"):
                ready = groups.drain_ready(max_tokens, idle)
            if not ready:
                return
            self.stop.raise_if_requested()
            for group in ready:
                _refuse_off_policy(group, groups.accepted_versions)
            prepared = [preparation.take(group) for group in ready]
            for each in prepared:
                totals.add_counts(each.counts)
            usable = [each.group for each in prepared]
            totals.denominator += self.functions.denominator(usable)
            if self.functions.value_denominator is not None:
                totals.value_denominator += self.functions.value_denominator(usable)
            yield prepared

    def _look_ahead(self, ahead: LookAhead) -> bool:
        self.cores.take()
        with self.clock.phase("look_ahead"):
            worked = ahead.work()
        if not worked:
            self.cores.rest()
        return worked

    def _wait_for_device(self, timer: DeviceTimer, other_work: Callable[[], bool] | None) -> bool:
        """First, so that waiting for a group is time in which nothing works."""
        with self.clock.phase("train"):
            timer.wait()
        return other_work is not None and other_work()

    def _to_run(
        self, trained: Sequence[TrainedGroup], compared: set[str], totals: BatchTotals
    ) -> list[TrainedGroup]:
        """Without the groups whose gradient is exactly zero.

        Each endpoint keeps a group whose log-probabilities are ``compared`` with the trainer's, in
        each update and on each rank; so there is a row for the step to be taken with.
        """
        if not self.functions.advantage_only:
            return list(trained)
        flat = [bool(group.responses) and not group.has_signal for group in trained]
        totals.metrics.add(MetricSums({"groups_without_signal": float(sum(flat))}))
        if not self.skip_without_signal:
            return list(trained)
        pairs = list(zip(trained, flat, strict=True))
        compared.update(*(_endpoints(group) for group, is_flat in pairs if not is_flat))
        kept = []
        for group, is_flat in pairs:
            if not is_flat or not _endpoints(group) <= compared:
                compared |= _endpoints(group)
                kept.append(group)
        return kept


def _endpoints(trained: TrainedGroup) -> set[str]:
    """That made the responses which are trained."""
    made = (trained.group.completions[r.sample].made_by for r in trained.responses)
    return {url for of_response in made for url, _ in of_response}


def _refuse_off_policy(group: RolloutGroup, accepted: frozenset[str]) -> None:
    for completion in group.completions:
        for span in completion.version_spans:
            if span.version not in accepted:
                raise OnPolicyViolation(
                    f"endpoint {completion.endpoint} stamped version {span.version!r} on "
                    f"prompt {group.prompt.index} of epoch {group.prompt.epoch}; training "
                    f"{' or '.join(sorted(accepted))!r}"
                )
