"""The loop: periodic asynchrony (paper §4.3, Algorithm 1), strictly on-policy.

Within one batch generation and training overlap; between batches the weights move once. The trainer
knows neither HTTP nor files: it is given a producer of groups, an engine, a weight sync and a
notary, who writes down what was trained before it counts as trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.closed_batch import batch_record
from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.event_log import Record
from easyrl.runtime.collectives import Agreement
from easyrl.schema import (
    TEMPORARY_FAILURE,
    Confirmation,
    InterruptedRun,
    PolicyVersion,
    Prompt,
    Published,
    ServedWeights,
    StopRequested,
)
from easyrl.trainer.accumulation import Accumulator, GroupSource

if TYPE_CHECKING:
    from easyrl.engines.base import TrainEngine


class Rollouts(Protocol):
    """Starts the generation of prompts (``JournalledRollouts``)."""

    def produce(
        self, prompts: Sequence[Prompt], served: ServedWeights, *, priority: int = 0
    ) -> GroupSource: ...

    def sync(self) -> None: ...


class PromptSource(Protocol):
    """Batches of prompts in one global order, with a resumable cursor (``PromptBatches``)."""

    def __iter__(self) -> Iterator[list[Prompt]]: ...
    def state(self) -> Mapping[str, Any]: ...


class Publisher(Protocol):
    """Brings weights to every endpoint and proves it (``WeightSync``)."""

    @property
    def confirmations(self) -> tuple[Confirmation, ...]: ...

    def publish(self, version: PolicyVersion) -> Published: ...


class Notary(Protocol):
    """Writes the account of each batch (``Certificate``; on other ranks than 0 nobody does)."""

    def check(self, record: BatchRecord) -> None: ...
    def close_batch(self, record: BatchRecord) -> None: ...
    def end(self, weights: str) -> None: ...


Hook = Callable[[int, PolicyVersion], dict[str, float]]  # step, version → metrics
AfterReport = Callable[[int, PolicyVersion], None]  # step, version
Report = Callable[[int, dict[str, float]], None]  # step, metrics


class TooManyBadSteps(RuntimeError):
    """Loss or gradient was not finite for ``trainer.max_bad_steps`` steps."""


class OtherWeights(RuntimeError):
    """A resumed run has other weights than those that were saved."""


@dataclass
class Progress:
    """Where the run is; part of every checkpoint."""

    step: int = 0  # optimizer steps, skipped ones included
    closed_batches: int = 0  # v of the policy version
    bad_steps: int = 0  # in a row
    cursor: Mapping[str, Any] = field(default_factory=dict)  # of the prompts, after closed batches
    weights: str = ""  # digest of the weights after closed batches, once they were published
    reported_step: int = -1  # whose metrics are out
    unreported: dict[str, float] = field(default_factory=dict)  # of a closed batch, until they are


class Trainer:
    """Drains the producer's queue, micro-batch by micro-batch, into optimizer steps.

    Args:
        engine: the model being trained.
        batches: prompts of all ranks, the same sequence on each rank.
        rollouts: producer of finished groups.
        weight_sync: brings new weights to the endpoints.
        accumulator: runs forward and backward of groups as they arrive. When it is interrupted, the
            open batch is given up, ``save`` is called and ``InterruptedRun`` raised.
        notary: writes down what was trained.
        save: writes a checkpoint of ``progress``; returns when it is there. Collective.
        save_at_end: the same, when the prompts or ``max_steps`` have ended.
        after_publish: called after each sync with step and version; their metrics belong to the
            step's: evaluation. Not called when a resumed run publishes what was reported before.
        watch: sees the sums of each batch's first update, of all ranks (``MetricSums``).
        on_step: receive each batch's metrics, in order; may add to them.
        after_report: called when a batch's metrics are out: checkpoints, which a resumed run goes
            on from, so that none is ever ahead of the metrics.
        updates_per_batch: k, optimizer steps on each batch, each on its slice of the prompts.
    """

    def __init__(
        self,
        *,
        engine: TrainEngine,
        batches: PromptSource,
        rollouts: Rollouts,
        weight_sync: Publisher,
        agreement: Agreement,
        accumulator: Accumulator,
        notary: Notary,
        save: Callable[[], None],
        save_at_end: Callable[[], None] = lambda: None,
        record: Record,
        after_publish: Sequence[Hook] = (),
        watch: Callable[[Mapping[str, float]], object] = lambda sums: None,
        on_step: Sequence[Report] = (),
        after_report: Sequence[AfterReport] = (),
        version: PolicyVersion,
        updates_per_batch: int = 1,
        max_steps: int | None = None,
        max_bad_steps: int = 3,
        progress: Progress | None = None,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._rollouts = rollouts
        self._weight_sync = weight_sync
        self._agreement = agreement
        self._accumulator = accumulator
        self._notary = notary
        self._save = save
        self._save_at_end = save_at_end
        self._record = record
        self._after_publish = after_publish
        self._watch = watch
        self._on_step = on_step
        self._after_report = after_report
        self._version = version
        self._updates_per_batch = updates_per_batch
        self._max_steps = max_steps
        self._max_bad_steps = max_bad_steps
        self._open_updates = 0  # optimizer steps of the open batch
        self.progress = progress or Progress(cursor=batches.state())

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that the open batch is made by."""
        return self._version._replace(v=self.progress.closed_batches)

    def fit(self) -> None:
        """Trains until the prompts or ``max_steps`` end.

        Raises ``InterruptedRun`` in an outage and when a stop was asked for.
        """
        try:
            self._fit()
        except Exception as error:
            if not self._accumulator.is_interruption(error):
                raise
            self._record("interrupted", problem=str(error))
            raise InterruptedRun(
                f"{error}\n{self._save_if_whole()}; go on with --resume",
                status=0 if isinstance(error, StopRequested) else TEMPORARY_FAILURE,
            ) from error

    def _fit(self) -> None:
        published = self._publish()
        if self.progress.reported_step < self.progress.step:  # not if an earlier attempt has
            self._report(published)
        for prompts in self._remaining_batches():
            start = time.monotonic()
            metrics = self.train_batch(prompts, published.served)
            metrics["time/step_s"] = time.monotonic() - start
            self.progress.unreported = metrics  # goes into the checkpoint if this attempt ends here
            published = self._publish()
            metrics["time/step_s"] = time.monotonic() - start
            self._report(published)
            for hook in self._after_report:
                hook(self.progress.step, self.version)
        self._save_at_end()
        self._notary.end(published.served.digest)

    def train_batch(self, prompts: Sequence[Prompt], served: ServedWeights) -> dict[str, float]:
        """One batch: generation and training overlap, optimizer steps close it."""
        start = time.monotonic()
        self._engine.begin_batch()
        updates: list[Update] = []
        with ExitStack() as on_error:
            sources = []
            slices = self._slices(prompts)
            for number, part in enumerate(slices):
                groups = self._rollouts.produce(self._share(part), served, priority=number)
                on_error.callback(groups.close)
                sources.append(groups)
            for part, groups in zip(slices, sources, strict=True):
                totals = self._accumulator.accumulate(groups)
                self._give_up_if_interrupted(totals)
                update = self._merge(totals, groups, part)
                updates.append(update)
                self._check(updates, served)
                self._step(update)
            on_error.pop_all()
        metrics = batch_metrics(updates) | self._certify(updates, served)
        self._close(updates)
        metrics["time/journal_s"] += sum(groups.load_s for groups in sources)
        metrics["time/batch_s"] = time.monotonic() - start
        return metrics

    def _give_up_if_interrupted(self, totals: BatchTotals) -> None:
        """Ends the open batch on all ranks if one of them cannot go on. Collective."""
        try:
            self._agreement.end_together(totals.interruption)
        except Exception:
            self._engine.discard_gradients()
            raise

    def _merge(self, totals: BatchTotals, groups: GroupSource, prompts: Sequence[Prompt]) -> Update:
        """The sums of all ranks. Collective."""
        totals.discarded = sorted(groups.discarded)
        totals.accepted_versions = sorted(groups.accepted_versions)
        merged = totals.merge(self._agreement)
        if not self._open_updates:  # later updates train weights that have moved on
            self._watch(merged.metrics.sums)
        return Update(merged, totals.groups, [prompt.key for prompt in prompts])

    def _check(self, updates: Sequence[Update], served: ServedWeights) -> None:
        """Nothing is trained that the certificate would not take. Raises what the notary raises."""
        start = time.monotonic()
        self._notary.check(self._account(updates, served))
        updates[-1].check_s = time.monotonic() - start

    def _step(self, update: Update) -> None:
        """The late scalar, the clip, the step."""
        start = time.monotonic()
        if update.totals.denominator > 0:
            update.result = self._engine.optimizer_step(update.totals.denominator)
            self._open_updates += 1
        else:  # every token was masked
            self._engine.discard_gradients()
        update.optimizer_s = time.monotonic() - start

    def _certify(self, updates: Sequence[Update], served: ServedWeights) -> dict[str, float]:
        """The batch is written down; the seconds that its journal and account took. Collective."""
        start = time.monotonic()
        self._rollouts.sync()
        self._agreement.exchange(None)  # the journals of all ranks come before the certificate ...
        synced = time.monotonic()
        self._notary.close_batch(self._account(updates, served))
        self._agreement.exchange(None)  # ... and the certificate before the step
        return {
            "time/journal_s": synced - start,
            "time/certificate_s": time.monotonic() - synced + sum(u.check_s for u in updates),
        }

    def _close(self, updates: Sequence[Update]) -> None:
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
                accepted=update.totals.accepted_versions,
                skipped=update.skipped,
            )
            self._record_fates(update)
        self.progress.closed_batches += 1
        self.progress.weights = ""
        self.progress.cursor = self._batches.state()
        self._open_updates = 0
        if most_bad_steps >= self._max_bad_steps:
            raise TooManyBadSteps(
                f"{most_bad_steps} steps in a row had no finite gradient or nothing to "
                f"train (step {self.progress.step}); lower trainer.learning_rate or look at the "
                "rewards"
            )

    def _account(self, updates: Sequence[Update], served: ServedWeights) -> BatchRecord:
        step = self.progress.step + len(updates)
        return batch_record(updates, served, step, self._weight_sync.confirmations)

    def _record_fates(self, update: Update) -> None:
        """What became of each of this rank's groups: *trained* is in a committed step."""
        for group in update.own_groups:
            self._record(
                f"group_{update.outcome(group)}",
                epoch=group.epoch,
                index=group.index,
                stamped=group.stamped,
            )

    def _save_if_whole(self) -> str:
        """A checkpoint of the closed batches; what there is to go on from, in words. Collective."""
        if self._open_updates:  # the weights are not those that the open batch is made by
            return (
                f"{self._open_updates} of {self._updates_per_batch} updates of the open batch were "
                "taken, the last checkpoint stays and the journal has the responses since"
            )
        self._save()
        return f"step {self.progress.step} is saved"

    def _publish(self) -> Published:
        """Moves the weights to every endpoint."""
        self._record("sync_start", version=str(self.version))
        published = self._weight_sync.publish(self.version)
        self._record("sync_end", version=str(self.version))
        digest = published.served.digest
        if self.progress.weights not in ("", digest):
            raise OtherWeights(
                f"the weights of batch {self.progress.closed_batches} are {digest[:16]} and were "
                f"{self.progress.weights[:16]} when the checkpoint was written: it was not "
                "restored as it was saved; resume from another one"
            )
        self.progress.weights = digest
        return published

    def _evaluate(self) -> dict[str, float]:
        """What the hooks have to say of the weights that were just published."""
        metrics: dict[str, float] = {}
        for hook in self._after_publish:
            metrics |= hook(self.progress.step, self.version)
        return metrics

    def _report(self, published: Published) -> None:
        """What the last batch, its sync and its evaluation have to say goes out."""
        metrics = self.progress.unreported | dict(published.metrics) | self._evaluate()
        for report in self._on_step:
            report(self.progress.step, metrics)
        self.progress.reported_step = self.progress.step
        self.progress.unreported = {}

    def _remaining_batches(self) -> Iterator[list[Prompt]]:
        # Tested before the next batch is taken: the cursor must not run ahead of the training.
        batches = iter(self._batches)
        while self._max_steps is None or self.progress.step < self._max_steps:
            prompts = next(batches, None)
            if prompts is None:
                return
            yield prompts

    def _slices(self, prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
        """Prompts of all ranks for each update, by prompt order; a last batch may be shorter."""
        size = -(-len(prompts) // self._updates_per_batch)
        return [prompts[i : i + size] for i in range(0, len(prompts), size)]

    def _share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts[self._engine.dp_rank :: self._engine.dp_size])
