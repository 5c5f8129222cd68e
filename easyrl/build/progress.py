"""What the console is told of an open step: read from the parts of a run, a few times a second."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from easyrl.build.inference import Inference
from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.metrics.step_progress import DOES, WAITS_FOR_ENDPOINTS, StepProgress
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.schema import Progress
from easyrl.trainer.evaluation import ScheduledEvaluation


class Batches(Protocol):
    """A run's batches (``JournalledRollouts``, ``RecordBatches``)."""

    @property
    def progress(self) -> BatchProgress | None: ...


@dataclass(frozen=True)
class ProgressView:
    """Reads where a run is; its call is safe from any thread, and changes nothing."""

    clock: PhaseClock  # the trainer's
    progress: Progress
    batches: Batches
    checkpoints: Checkpoints
    updates_per_batch: int = 1
    inference: Inference | None = None  # None: of a run on records
    evaluation: ScheduledEvaluation | None = None  # None: there is none, or not of endpoints

    def __call__(self) -> StepProgress:
        reported, phase = self.progress.reported_step, self.clock.running
        seen = StepProgress(
            step=0 if reported < 0 else reported + self.updates_per_batch,
            does=DOES[phase],
            unit="records" if self.inference is None else "groups",
            evaluated=None if self.evaluation is None else self.evaluation.answered,
            writes_checkpoint=self.checkpoints.is_writing,
        )
        batch = self.batches.progress
        if batch is not None:
            seen = replace(seen, size=batch.size, arrived=batch.arrived, trained=batch.trained)
        if self.inference is None:
            return seen
        pool, endpoints = self.inference.pool, list(self.inference.pool.endpoints)
        return replace(
            seen,
            does=WAITS_FOR_ENDPOINTS if pool.in_outage else seen.does,
            in_flight=sum(endpoint.num_inflight for endpoint in endpoints),
            scoring=self.inference.rewards_busy.num_running,
            endpoints_down=tuple(each.url for each in endpoints if not each.is_up),
        )
