"""The loop: periodic asynchrony (paper §4.3, Algorithm 1), strictly on-policy.

Within one batch generation and training overlap; between batches the weights move once. The trainer
knows neither HTTP nor files: it is given a producer of groups, an engine and a weight sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from easyrl.agreement import Agreement
from easyrl.batch_metrics import BatchTotals, batch_metrics
from easyrl.engines.base import NonFiniteLossError
from easyrl.event_log import Record
from easyrl.schema import MicroBatch, PolicyVersion, Prompt, RolloutGroup

if TYPE_CHECKING:
    from easyrl.engines.base import TrainEngine


class GroupSource(Protocol):
    """The groups of one batch (``GroupStream``)."""

    wait_s: float
    first_group_wait_s: float | None

    def take_ready(self, max_tokens: int) -> list[RolloutGroup]: ...
    def complete(self) -> None: ...
    def close(self) -> None: ...


class Rollouts(Protocol):
    """Starts the generation of a batch (``RolloutGenerator``)."""

    def produce(self, prompts: Sequence[Prompt], version: str) -> GroupSource: ...


class PromptSource(Protocol):
    """Batches of prompts in one global order, with a resumable cursor (``PromptBatches``)."""

    def __iter__(self) -> Iterator[list[Prompt]]: ...


class Publisher(Protocol):
    """Brings weights to every endpoint and proves it (``WeightSync``)."""

    def publish(self, version: PolicyVersion) -> dict[str, float]: ...


Advantages = Callable[[RolloutGroup], np.ndarray]  # float32 [G]
Pack = Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]
Denominator = Callable[[Sequence[RolloutGroup]], float]
Hook = Callable[[int, PolicyVersion], dict[str, float]]  # step, version → metrics
AfterReport = Callable[[int, PolicyVersion], None]  # step, version
Report = Callable[[int, dict[str, float]], None]  # step, metrics


class OnPolicyViolation(RuntimeError):
    """A sample was not made by the weights being trained; it is refused."""


class TooManyBadSteps(RuntimeError):
    """Loss or gradient was not finite for ``trainer.max_bad_steps`` steps."""


@dataclass
class Progress:
    """Where the run is; part of every checkpoint."""

    step: int = 0  # optimizer steps, skipped ones included
    closed_batches: int = 0  # v of the policy version
    bad_steps: int = 0  # in a row


class Trainer:
    """Drains the producer's queue, micro-batch by micro-batch, into optimizer steps.

    Args:
        engine: the model being trained.
        batches: prompts of all ranks, the same sequence on each rank.
        rollouts: producer of finished groups.
        weight_sync: brings new weights to the endpoints.
        advantages, pack, denominator: the objective's pure functions (denominator: late scalar).
        dummy: a micro-batch without weight, for a rank that has run out of work.
        after_publish: called after each sync with step and version; their metrics belong to the
            step's: evaluation. Not called when a resumed run publishes what it has loaded.
        on_step: receive each step's metrics, in order; may add to them.
        after_report: called when a batch's metrics are out: checkpoints, which a resumed run goes
            on from, so that none is ever ahead of the metrics.
        max_tokens: packed tokens per micro-batch.
        synchronous: wait for the whole batch before training (``mode: sync``).
    """

    def __init__(
        self,
        *,
        engine: TrainEngine,
        batches: PromptSource,
        rollouts: Rollouts,
        weight_sync: Publisher,
        agreement: Agreement,
        advantages: Advantages,
        pack: Pack,
        denominator: Denominator,
        dummy: Callable[[], MicroBatch],
        record: Record,
        after_publish: Sequence[Hook] = (),
        on_step: Sequence[Report] = (),
        after_report: Sequence[AfterReport] = (),
        version: PolicyVersion,
        max_tokens: int,
        synchronous: bool = False,
        max_steps: int | None = None,
        max_bad_steps: int = 3,
        progress: Progress | None = None,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._rollouts = rollouts
        self._weight_sync = weight_sync
        self._agreement = agreement
        self._advantages = advantages
        self._pack = pack
        self._denominator = denominator
        self._dummy = dummy
        self._record = record
        self._after_publish = after_publish
        self._on_step = on_step
        self._after_report = after_report
        self._version = version
        self._max_tokens = max_tokens
        self._synchronous = synchronous
        self._max_steps = max_steps
        self._max_bad_steps = max_bad_steps
        self.progress = progress or Progress()

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights as they are now."""
        return self._version._replace(v=self.progress.closed_batches)

    def fit(self) -> None:
        """Trains until the prompts or ``max_steps`` end."""
        metrics = self._publish()
        if self.progress.step == 0:  # a resumed run has evaluated and reported this step before
            self._report(metrics | self._evaluate())
        for prompts in self._remaining_batches():
            start = time.monotonic()
            metrics = self.train_batch(prompts) | self._publish()
            metrics["time/step_s"] = time.monotonic() - start
            self._report(metrics | self._evaluate())
            for hook in self._after_report:
                hook(self.progress.step, self.version)

    def train_batch(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One batch: generation and training overlap, one optimizer step closes it."""
        start = time.monotonic()
        groups = self._rollouts.produce(self._share(prompts), str(self.version))
        try:
            if self._synchronous:
                self._record("waiting_for_batch")
                groups.complete()
            totals = self._accumulate(groups)
        except BaseException:
            groups.close()
            raise
        totals.wait_s = groups.wait_s
        totals.first_group_wait_s = groups.first_group_wait_s or 0.0  # a rank may have no prompt
        metrics = self._step(totals)
        metrics["time/batch_s"] = time.monotonic() - start
        return metrics

    def _accumulate(self, groups: GroupSource) -> BatchTotals:
        """Runs forward and backward for each micro-batch as its groups arrive."""
        totals = BatchTotals()
        work = self._micro_batches(groups, totals)
        if self._engine.lockstep:
            work = self._agreement.in_lockstep(work, self._dummy)
        for micro_batch in work:
            self._record("micro_batch_start", num_tokens=micro_batch.num_tokens)
            start = time.monotonic()
            try:
                for sums in self._engine.forward_backward([micro_batch]):
                    totals.metrics.add(sums)
            except NonFiniteLossError as error:
                # The gradient is NaN now, so every rank will skip the step; the batch goes on.
                self._record("non_finite_loss", problem=str(error))
            totals.train_s += time.monotonic() - start
            if not micro_batch.is_dummy:
                totals.num_packed_tokens += micro_batch.num_tokens
                totals.num_micro_batches += 1
            self._record("micro_batch_end")
        return totals

    def _micro_batches(self, groups: GroupSource, totals: BatchTotals) -> Iterator[MicroBatch]:
        while ready := groups.take_ready(self._max_tokens):
            for group in ready:
                self._refuse_off_policy(group)
                totals.add_group(group)
            totals.denominator += self._denominator(ready)
            yield from self._pack(ready, [self._advantages(group) for group in ready])

    def _step(self, totals: BatchTotals) -> dict[str, float]:
        """The late scalar, the clip, the step; closes the batch on all ranks."""
        start = time.monotonic()
        merged = totals.merge(self._agreement)
        if merged.denominator > 0:
            result = self._engine.optimizer_step(merged.denominator)
        else:  # every token of the batch was masked
            self._engine.discard_gradients()
            result = None
        self.progress.step += 1
        self.progress.closed_batches += 1
        skipped = result is None or result.skipped
        self.progress.bad_steps = self.progress.bad_steps + 1 if skipped else 0
        self._record("step", step=self.progress.step, skipped=skipped)
        if self.progress.bad_steps >= self._max_bad_steps:
            raise TooManyBadSteps(
                f"{self.progress.bad_steps} steps in a row had no finite gradient or nothing to "
                f"train (step {self.progress.step}); lower trainer.learning_rate or look at the "
                "rewards"
            )
        metrics = batch_metrics(merged, result)
        metrics["time/optimizer_s"] = time.monotonic() - start
        return metrics

    def _publish(self) -> dict[str, float]:
        """Moves the weights to every endpoint."""
        self._record("sync_start", version=str(self.version))
        metrics = dict(self._weight_sync.publish(self.version))
        self._record("sync_end", version=str(self.version))
        return metrics

    def _evaluate(self) -> dict[str, float]:
        """What the hooks have to say of the weights that were just published."""
        metrics: dict[str, float] = {}
        for hook in self._after_publish:
            metrics |= hook(self.progress.step, self.version)
        return metrics

    def _report(self, metrics: dict[str, float]) -> None:
        for report in self._on_step:
            report(self.progress.step, metrics)

    def _remaining_batches(self) -> Iterator[list[Prompt]]:
        # Tested before the next batch is taken: the cursor must not run ahead of the training.
        batches = iter(self._batches)
        while self._max_steps is None or self.progress.step < self._max_steps:
            prompts = next(batches, None)
            if prompts is None:
                return
            yield prompts

    def _share(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return list(prompts[self._engine.dp_rank :: self._engine.dp_size])

    def _refuse_off_policy(self, group: RolloutGroup) -> None:
        expected = str(self.version)
        for completion in group.completions:
            for span in completion.version_spans:
                if span.version != expected:
                    raise OnPolicyViolation(
                        f"endpoint {completion.endpoint} stamped version {span.version!r} on "
                        f"prompt {group.prompt.index} of epoch {group.prompt.epoch}; training "
                        f"{expected!r}"
                    )
