"""Training loop of periodic asynchrony (paper §4.3, Algorithm 1), strictly on-policy.

Within one batch generation and training overlap; between batches the weights move once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field

import msgspec

from easyrl.ledger.account import batch_account
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.exclusions import recent_exclusions
from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics, recipe_metrics
from easyrl.metrics.reporter import StepReporter
from easyrl.runtime.device_time import DeviceTimer
from easyrl.schema import (
    NEEDS_CHANGE,
    TEMPORARY_FAILURE,
    BatchWithdrawn,
    EndpointsDisagree,
    GroupOutcome,
    InterruptedRun,
    NoEndpointServes,
    PolicyVersion,
    Progress,
    Published,
    RewardError,
    ServedWeights,
    StoppedByAlarm,
    StopRequested,
    TooManyExcluded,
    comparable,
)
from easyrl.trainer.accumulation import Accumulator, GroupSource
from easyrl.trainer.parts import (
    AlarmActions,
    Evaluation,
    Ledger,
    Memory,
    OpenBatch,
    Publisher,
    Rollouts,
    RunningEvaluation,
    Samples,
)


class TooManyBadSteps(InterruptedRun):
    """Loss or gradient was not finite for ``trainer.max_bad_steps`` steps; no checkpoint is written
    of what has led there."""


class NothingAccepted(RuntimeError):
    """Every prompt that a batch has drawn was rejected or excluded."""


class OtherWeights(RuntimeError):
    """A resumed run has other weights than those that were saved."""


@dataclass(frozen=True)
class TrainedBatch:
    """A batch whose optimizer steps are taken and which does not count yet."""

    batch: OpenBatch
    served: ServedWeights
    updates: Sequence[Update]
    refused: Sequence[GroupOutcome]  # of all ranks
    figures: Mapping[str, float]  # of the evaluation beside it; empty without one
    seconds: float  # from its first request to its last optimizer step
    controls: Mapping[str, float]  # of the recipe, behind them


@dataclass
class Trainer:
    """Drains the producer's queue, micro-batch by micro-batch, into optimizer steps."""

    rollouts: Rollouts
    # When it is interrupted, the open batch is given up, a checkpoint is written and
    # ``InterruptedRun`` raised.
    accumulator: Accumulator
    weight_sync: Publisher
    ledger: Ledger  # writes down what was trained before it counts as trained
    reporter: StepReporter
    first_version: PolicyVersion
    groups_per_update: int  # B / k, of all ranks; only an update that ends its batch may have fewer
    updates_per_batch: int = 1  # k, optimizer steps on each batch, each on its slice of the groups
    # The run ends with the last batch whose k steps are within them; None: with the prompts.
    max_steps: int | None = None
    max_bad_steps: int = 3
    num_prompts: int | None = None  # of an epoch
    progress: Progress = field(default_factory=Progress)
    evaluation: Evaluation | None = None  # of held-out prompts, beside the batches
    alarms: AlarmActions | None = None
    samples: Samples | None = None  # keeps some of what was trained
    memory: Memory | None = None  # hears the clock; its peaks are told of each batch

    def __post_init__(self) -> None:
        self.clock = self.accumulator.clock  # where the time of ``fit`` goes
        self._engine = self.accumulator.engine
        self._collectives = self.accumulator.collectives
        self._record = self.accumulator.record
        self._open_updates = 0  # optimizer steps of the open batch
        self._trained: TrainedBatch | None = None

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that the open batch is made by."""
        return self.first_version._replace(v=self.progress.closed_batches)

    def fit(self) -> None:
        """Trains until the prompts or ``max_steps`` end.

        Raises ``InterruptedRun`` in an outage, when a stop was asked for, by an alarm too, when
        endpoints refuse too many prompts, when a reward fails, and when no endpoint takes the
        weights.
        """
        try:
            self._fit()
        except Exception as error:
            if not self.accumulator.is_interruption(error):
                raise
            self._record("interrupted", problem=str(error))
            if isinstance(error, NoEndpointServes) and self.progress.closed_batches == 0:
                raise InterruptedRun(
                    f"inference.endpoints: {error}\n(start servers of model.path as "
                    "docs/endpoints.md says, then go on with --resume)",
                    status=NEEDS_CHANGE,
                ) from error
            saved = self._save_if_whole()
            if isinstance(error, TooManyExcluded):
                raise InterruptedRun(f"{error}\n{saved}", status=NEEDS_CHANGE) from error
            status = 0 if isinstance(error, StopRequested) else TEMPORARY_FAILURE
            if isinstance(error, StoppedByAlarm | RewardError | NothingAccepted):
                status = NEEDS_CHANGE
            raise InterruptedRun(f"{error}\n{saved}; go on with --resume", status=status) from error

    def _fit(self) -> None:
        published = self._publish()
        while self._goes_on:
            published = self._next_version(published)
        self._end(published)

    def _next_version(self, published: Published) -> Published:
        """One batch: generated by the published weights, trained, and the new weights published.

        The first requests of the batch go out before the last of its endpoints' proof, and before
        what the batch before has left to say and to save; an evaluation that is due is generated
        where the batch leaves endpoints idle. The optimizer step that ends the batch waits for it.
        """
        progress = self.progress
        start = time.monotonic()
        with ExitStack() as on_error, self.clock.phase("begin"):
            batch = self.rollouts.begin(published.served, progress.position, progress.excluded)
            on_error.callback(batch.close)
            evaluation = self._begin_evaluation(is_last=False)
            if evaluation is not None:
                on_error.callback(evaluation.close)
            with self.clock.phase("settle"):
                published = self.weight_sync.settle(published)
            self._report(published)
            with self.clock.phase("save"):
                if self.alarms is not None:
                    self.alarms.act(self.ledger, progress)
                self.ledger.save_if_due(progress)
            on_error.pop_all()
        with closing(evaluation) if evaluation is not None else nullcontext():
            self._trained = self._train(published.served, batch, evaluation)
        try:
            return self._publish()
        finally:
            if progress.unreported:  # it counts: also where the run ends here and saves
                progress.unreported["time/step_s"] = time.monotonic() - start

    def _end(self, published: Published) -> None:
        """The last version's evaluation has the endpoints for itself."""
        with self.clock.phase("settle"):
            published = self.weight_sync.settle(published)
        evaluation = self._begin_evaluation(is_last=True)
        figures: dict[str, float] = {}
        if evaluation is not None:
            with closing(evaluation), self.clock.phase("evaluation"):
                figures = evaluation.finish()
            self.progress.unevaluated = False
        self._report(published, figures)
        with self.clock.phase("save"):
            self.ledger.save_if_due(self.progress)
            self.ledger.end(self.progress, published.served.digest)

    @property
    def _goes_on(self) -> bool:
        # A batch that is cut short has fewer updates, so that the end may come inside one.
        next_step = self.progress.step + self.updates_per_batch
        has_steps = self.max_steps is None or next_step <= self.max_steps
        return has_steps and self.rollouts.has_more(self.progress.position)

    def _train(
        self, served: ServedWeights, batch: OpenBatch, evaluation: RunningEvaluation | None
    ) -> TrainedBatch:
        """``batch`` to its last optimizer step, which waits for ``evaluation``. Collective.

        It begins again where groups of it are withdrawn.
        """
        while True:
            try:
                return self._train_batch(served, batch, evaluation)
            except BatchWithdrawn as error:
                self._record("batch_withdrawn", version=str(served.version), problem=str(error))
                self.rollouts.share_withdrawals()
                if self._open_updates:  # the weights are not those that it was made by
                    raise
            progress = self.progress
            batch = self.rollouts.begin(served, progress.position, progress.excluded)

    def _train_batch(
        self, served: ServedWeights, batch: OpenBatch, evaluation: RunningEvaluation | None
    ) -> TrainedBatch:
        """Generation and training overlap."""
        start = time.monotonic()
        updates: list[Update] = []
        controls = self._controls()
        refused: list[GroupOutcome] | None = None  # of all ranks, once the batch is whole
        figures: dict[str, float] = {}
        with ExitStack() as on_error:
            on_error.callback(batch.close)
            self._engine.begin_batch()
            for number, groups in enumerate(batch.updates, start=1):
                if controls:
                    self._engine.set_controls(controls)
                totals = self._accumulate(groups)
                is_short = len(totals.groups) < self.groups_per_update  # nothing follows
                if totals.groups:
                    updates.append(Update(totals))
                    is_last = number == self.updates_per_batch or is_short
                    if is_last:
                        figures = self._finish(evaluation)
                    refused = self._check(batch, updates, served, whole=is_last)
                    self._step(updates[-1])
                    controls = self._next_controls(controls, updates[-1])
            if refused is None:  # the last update was empty
                figures = self._finish(evaluation if updates else None)
                refused = self._refused(batch)
            self._raise_if_withdrawn(batch)
            if not updates:
                raise self._nothing_accepted(refused)
            on_error.pop_all()
        seconds = time.monotonic() - start
        return TrainedBatch(batch, served, updates, refused, figures, seconds, controls)

    def _finish(self, evaluation: RunningEvaluation | None) -> dict[str, float]:
        """Waits for the rest of the evaluation beside the batch; its figures. Collective.

        Behind the step a stop could save nothing: the weights that are evaluated are gone then.
        """
        if evaluation is None:
            return {}
        self._record("evaluation_wait", version=str(self.version))
        start = time.monotonic()
        try:
            with self.clock.phase("evaluation"):
                figures = evaluation.finish()
        except Exception:
            self._engine.discard_gradients()
            raise
        return figures | {"time/evaluation_wait_s": time.monotonic() - start}

    def _count_trained(self) -> None:
        """Writes the trained batch down, which counts then; nothing without one. Collective."""
        trained, self._trained = self._trained, None
        if trained is None:
            return
        with self.clock.phase("ledger"):
            self._count_batch(trained)

    def _count_batch(self, trained: TrainedBatch) -> None:
        progress, updates = self.progress, trained.updates
        account = self._account(trained.batch, updates, trained.served, trained.refused)
        metrics = {"time/batch_s": trained.seconds} | batch_metrics(updates, account.groups)
        metrics |= self._certify(account, updates)
        if self.num_prompts is not None:
            metrics["epoch"] = (progress.position + account.num_drawn) / self.num_prompts
        if self.samples is not None:
            metrics |= self.samples.close_batch(progress.step + 1, updates)
        metrics["time/journal_s"] += sum(groups.load_s for groups in trained.batch.updates)
        if trained.figures:  # of the version that the batch was made by
            self.reporter.report_evaluation(progress.step, dict(trained.figures))
            progress.unevaluated = False
        progress.unreported = metrics  # goes into a checkpoint if the run ends here
        progress.controls = dict(trained.controls)
        self._count(account, updates)

    def _accumulate(self, groups: GroupSource) -> BatchTotals:
        """Forward and backward of one update's groups; the sums of all ranks. Collective."""
        with self.clock.phase("pack"):
            totals = self.accumulator.accumulate(groups)
        with self.clock.phase("ranks"):
            return self._merged(totals)

    def _merged(self, totals: BatchTotals) -> BatchTotals:
        """The sums of all ranks, unless one is interrupted. Collective."""
        if isinstance(totals.interruption, EndpointsDisagree):
            self._compare(totals)  # says why, as far as this rank knows
            self.rollouts.withdraw_endpoints(totals.interruption.problems)
        try:
            self._collectives.end_together(totals.interruption)
        except Exception:
            self._engine.discard_gradients()
            raise
        merged = totals.merge(self._collectives)
        self._compare(merged)
        return merged

    def _compare(self, totals: BatchTotals) -> None:
        if not self._open_updates:  # later updates train weights that have moved on
            self.reporter.compare(totals)

    def _check(
        self, batch: OpenBatch, updates: Sequence[Update], served: ServedWeights, *, whole: bool
    ) -> list[GroupOutcome] | None:
        """Nothing is trained that the certificate would refuse: raises what the ledger raises.

        The refused groups of all ranks if the batch is ``whole``. Collective.
        """
        start = time.monotonic()
        with self.clock.phase("check"):
            self._raise_if_withdrawn(batch)
            refused = self._refused(batch) if whole else None
            account = self._account(batch, updates, served, refused)
            try:
                self.accumulator.judge(account.agreement)  # of all ranks, and all updates so far
            except EndpointsDisagree as error:
                self.rollouts.withdraw_endpoints(error.problems)
                self._engine.discard_gradients()
                raise
            self.ledger.check(account, whole=whole)
        updates[-1].check_s = time.monotonic() - start
        return refused

    def _raise_if_withdrawn(self, batch: OpenBatch) -> None:
        """Raises on all ranks if groups of the batch were taken back on one. Collective."""
        reasons = [reason for reason in self._collectives.all_gather(batch.withdrawn) if reason]
        if reasons:
            self._engine.discard_gradients()
            raise BatchWithdrawn(reasons[0])

    def _step(self, update: Update) -> None:
        """The late scalar, the clip, the step."""
        timer = DeviceTimer.of(self._engine.device)
        with self.accumulator.cores.computing(), self.clock.phase("step"), timer.span():
            if update.totals.denominator > 0:
                totals = update.totals
                update.result = self._engine.optimizer_step(
                    totals.denominator, totals.value_denominator
                )
                self._open_updates += 1
            else:  # every token was masked
                self._engine.discard_gradients()
        update.optimizer_s = timer.total_s()  # what comes next needs the weights anyway

    def _controls(self) -> Mapping[str, float]:
        """Those of the batch before, unless they are another recipe's."""
        initial, saved = self.accumulator.functions.initial_controls, self.progress.controls
        return saved if initial and initial.keys() <= saved.keys() else initial

    def _next_controls(self, controls: Mapping[str, float], update: Update) -> Mapping[str, float]:
        if update.skipped:
            return controls
        return self.accumulator.functions.next_controls(controls, recipe_metrics(update.totals))

    def _nothing_accepted(self, refused: Sequence[GroupOutcome]) -> NothingAccepted:
        reasons = sorted({f"{group.outcome}: {group.reason}" for group in refused})
        return NothingAccepted(
            f"batch {self.progress.closed_batches} has drawn {len(refused)} prompts and accepted "
            "none:\n" + "\n".join(f"  {reason}" for reason in reasons[:10]) + "\n"
            "(look at rewards and recipe, or let a batch draw more: trainer.max_draws_per_batch)"
        )

    def _account(
        self,
        batch: OpenBatch,
        updates: Sequence[Update],
        served: ServedWeights,
        refused: Sequence[GroupOutcome] | None,
    ) -> BatchRecord:
        """The batch's account up to the last of ``updates``; ``refused`` None: it goes on."""
        return batch_account(
            updates,
            refused or (),
            served,
            self.progress.step + len(updates),
            self.weight_sync.confirmations,
            accepted_versions=batch.accepted_versions,
            discarded=batch.discarded,
            ended_by="accepted" if refused is None else batch.membership.ended_by,
        )

    def _refused(self, batch: OpenBatch) -> list[GroupOutcome]:
        """Rejected and excluded groups of all ranks. Collective."""
        told = self._collectives.all_gather(msgspec.to_builtins(list(batch.refused)))
        return [
            msgspec.structs.replace(msgspec.convert(group, GroupOutcome), rank=rank)
            for rank, groups in enumerate(told)
            for group in groups
        ]

    def _certify(self, account: BatchRecord, updates: Sequence[Update]) -> dict[str, float]:
        """The batch is written down; the seconds that its journal and account took, and the ranks'
        largest peaks of memory. Collective."""
        start = time.monotonic()
        self.rollouts.sync()
        # the journals of all ranks come before the certificate
        peaks = self._collectives.all_gather({} if self.memory is None else self.memory.take())
        synced = time.monotonic()
        self.ledger.close_batch(account)
        return {
            **_largest(peaks),
            "time/journal_s": synced - start,
            "time/certificate_s": time.monotonic() - synced + sum(u.check_s for u in updates),
        }

    def _count(self, account: BatchRecord, updates: Sequence[Update]) -> None:
        """From here on the batch counts."""
        version = str(self.version)
        most_bad_steps = 0
        for update in updates:
            self.progress.step += 1
            self.progress.bad_steps = self.progress.bad_steps + 1 if update.skipped else 0
            most_bad_steps = max(most_bad_steps, self.progress.bad_steps)
            self._record(
                "step",
                step=self.progress.step,
                version=version,
                accepted=account.accepted_versions,
                skipped=update.skipped,
            )
        for group in account.groups:
            if group.rank == self._collectives.ranks.dp_rank:
                self._record("group_closed", version=version, **msgspec.to_builtins(group))
        self.progress.closed_batches += 1
        self.progress.weights = ""
        self.progress.excluded = recent_exclusions(
            self.progress.excluded,
            account.groups,
            self.progress.position,
            self.groups_per_update * self.updates_per_batch,
        )
        self.progress.position += account.num_drawn
        self._open_updates = 0
        if most_bad_steps >= self.max_bad_steps:
            raise TooManyBadSteps(
                f"{most_bad_steps} steps in a row had no finite gradient or nothing to "
                f"train (step {self.progress.step}); lower trainer.learning_rate or look at the "
                "rewards, then go on with --resume from the checkpoint before, or begin anew",
                status=NEEDS_CHANGE,
            )

    def _save_if_whole(self) -> str:
        """A checkpoint of the closed batches; what there is to go on from, in words. Collective."""
        if self._open_updates:  # the weights are not those that the open batch is made by
            return (
                f"{self._open_updates} of {self.updates_per_batch} updates of the open batch "
                "were taken, the last checkpoint stays and the journal has the responses since"
            )
        self.ledger.save(self.progress)
        return f"step {self.progress.step} is saved"

    def _publish(self) -> Published:
        """Moves the weights to every endpoint; meanwhile the batch that made them is counted."""
        version = self.version
        if self._trained is not None:
            version = version._replace(v=version.v + 1)
        self._record("sync_start", version=str(version))
        try:
            with self.clock.phase("sync"):
                published = self.weight_sync.publish(
                    version, self._count_trained, canary_follows=True
                )
        except Exception as error:
            # Before the weights are on their way: all ranks raise what is an interruption.
            if self.accumulator.is_interruption(error):
                self._count_trained()
            raise
        self._record("sync_end", version=str(version))
        digest, before = published.served.digest, self.progress.weights or published.served.digest
        if comparable(digest, before) and digest != before:
            raise OtherWeights(
                f"the weights of batch {self.progress.closed_batches} are {digest[:24]} and were "
                f"{before[:24]} when the checkpoint was written: it was not "
                "restored as it was saved; resume from another one"
            )
        self.progress.weights = digest
        return published

    def _report(self, published: Published, figures: Mapping[str, float] | None = None) -> None:
        """What the last batch, its sync and ``figures`` have to say goes out, once."""
        progress, figures = self.progress, dict(figures or {})
        with self.clock.phase("report"):
            if progress.reported_step < progress.step:  # not if an earlier attempt has
                metrics = progress.unreported | dict(published.metrics) | figures
                spent = self.clock.take()  # since the report before
                metrics |= {f"time/phase_{name}_s": seconds for name, seconds in spent.items()}
                self.reporter.report(progress.step, metrics)
            elif figures:
                self.reporter.report_evaluation(progress.step, figures)
        progress.reported_step = progress.step
        progress.unreported = {}

    def _begin_evaluation(self, *, is_last: bool) -> RunningEvaluation | None:
        """That of the published version, if it is due or an attempt before has not finished it."""
        progress = self.progress
        is_reported = progress.reported_step == progress.step
        if self.evaluation is None:
            progress.unevaluated = False  # an attempt before had one
            return None
        if is_reported and not progress.unevaluated:
            return None
        evaluation = self.evaluation.begin(
            progress.step, self.version, is_last=is_last, again=progress.unevaluated
        )
        progress.unevaluated = evaluation is not None
        return evaluation


def _largest(peaks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all ranks, whose phases may differ."""
    names = dict.fromkeys(name for of_rank in peaks for name in of_rank)
    return {name: max(of[name] for of in peaks if name in of) for name in names}
