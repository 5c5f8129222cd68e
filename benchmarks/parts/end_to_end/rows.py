"""What was measured, a JSON line per run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from benchmarks.parts.row_file import RowFile

PHASE = "phase "  # begins the name of a span that is part of the span "rest"


class Step(msgspec.Struct):
    """An optimizer step with all that belongs to it."""

    seconds: float
    spans: dict[str, float]  # seconds, a side's own names
    reward: float  # mean over the batch
    response_tokens: float  # mean over the batch


class Measured(msgspec.Struct):
    """A run's steps that count."""

    steps: list[Step]
    heldout: float | None = None  # of the trained model, ``heldout.heldout_logprob``


class Key(msgspec.Struct, frozen=True):
    """Which run it was."""

    workload: str
    side: str
    pair: int
    num_steps: int  # that count
    settings: str = ""  # what else decides its time: our command line, TRL's micro-batch
    revision: str = ""  # of this repository
    num_tried: int = 0  # batches before them in which ``auto`` may try; older rows have one at most


class Row(msgspec.Struct):
    """One run of one side."""

    key: Key
    measured: Measured

    @property
    def steps(self) -> list[Step]:
        return self.measured.steps

    @property
    def step_s(self) -> float:
        """Median over its steps."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def spans(self) -> dict[str, float]:
        """Medians over its steps."""
        return {
            name: statistics.median(step.spans[name] for step in self.steps)
            for name in self.steps[0].spans
        }

    def step_median(self, seconds: Callable[[Step], float]) -> float:
        """Of something else that a step comes to."""
        return statistics.median(map(seconds, self.steps))


class Rows(RowFile[Key, Measured, Row]):
    """The rows of a file."""

    row = Row
