"""What a run is doing at a moment, told from the events of its first rank."""

from __future__ import annotations

from benchmarks.parts.run_watch import Event
from easyrl.schema import PolicyVersion

STARTING, SYNCING, GENERATING = "starting", "syncing", "generating"
TRAINING, CLOSING, STOPPING = "training", "closing", "stopping"
PHASES = (STARTING, SYNCING, GENERATING, TRAINING, CLOSING, STOPPING)
BEGINS = {
    "sync_start": SYNCING,
    "sync_end": CLOSING,
    "batch_dispatched": GENERATING,
    "micro_batch_start": TRAINING,
    "interrupted": STOPPING,
}


class RunPhase:
    """Follows one attempt of a run after the other. One update per batch.

    Attributes:
        name: one of ``PHASES``. Closing: the sums of all ranks, the step. Syncing: the
            certificate, too.
        writes_checkpoint: one is being written in the background.
        closed_batches: the most that any attempt had closed.
        has_dispatched: whether the present attempt has begun a batch.
    """

    def __init__(self) -> None:
        self.closed_batches = 0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.name = STARTING
        self.writes_checkpoint = False
        self.has_dispatched = False
        self._is_generated = False  # the open batch, on all ranks

    def take(self, event: Event) -> None:
        kind = event["event"]
        self.name = BEGINS.get(kind, self.name)
        if kind == "batch_dispatched":
            self.has_dispatched = True
            self._is_generated = False
        elif kind == "batch_generated":
            self._is_generated = True
        elif kind == "micro_batch_end":
            self.name = CLOSING if self._is_generated else GENERATING
        elif kind == "step":
            self.closed_batches = max(
                self.closed_batches, PolicyVersion.parse(event["version"]).v + 1
            )
        elif kind.startswith("checkpoint_"):
            self.writes_checkpoint = kind == "checkpoint_copied"
