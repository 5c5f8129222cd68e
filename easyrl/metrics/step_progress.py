"""Where a run is inside a step, in words that fit 80 columns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

LOOK_EVERY_S = 0.5
WAITS_FOR_ENDPOINTS = "waits for an endpoint"
# What the first rank's trainer thread does in each of its phases (docs/architecture.md).
DOES = {
    "begin": "begins the batch",
    "settle": "waits for the endpoints' proof",
    "report": "reports the step before",
    "save": "copies the state to save",
    "wait": "waits for groups",
    "pack": "packs micro-batches",
    "train": "trains",
    "look_ahead": "prepares open groups",
    "ranks": "waits for the other ranks",
    "evaluation": "waits for the evaluation",
    "check": "checks the batch",
    "step": "takes the optimizer step",
    "sync": "sends the weights",
    "ledger": "writes the batch down",
    "other": "",  # between them, and behind the last step
}


@dataclass(frozen=True)
class StepProgress:
    """What goes on at a moment of a step, as far as the first rank knows."""

    step: int  # whose line comes next
    does: str  # the trainer, of ``DOES``
    unit: str = "groups"
    # of the open batch; None: there is none
    size: int | None = None  # groups of all ranks
    arrived: int = 0  # of these, finished and accepted
    trained: int = 0  # by the first rank
    in_flight: int | None = None  # requests; None: there are no endpoints
    scoring: int = 0  # calls of rewards that run, or wait for a worker
    evaluated: tuple[int, int] | None = None  # questions that are scored, and all; None: no one
    writes_checkpoint: bool = False  # in the background
    endpoints_down: tuple[str, ...] = ()  # URLs

    def counts(self) -> str:
        """All that is counted."""
        said = []
        if self.size is not None:
            said.append(f"{self.unit} {self.arrived}/{self.size}  trained {self.trained}")
        if self.in_flight is not None:
            said.append(f"in flight {self.in_flight}")
        if self.scoring:
            said.append(f"scoring {self.scoring}")
        if self.evaluated is not None:
            said.append("eval {}/{}".format(*self.evaluated))
        return "  ".join(said)

    def notes(self) -> str:
        """What is not always so; may be empty."""
        said = ["writes a checkpoint"] if self.writes_checkpoint else []
        if self.endpoints_down:
            first, *others = self.endpoints_down
            more = f" and {len(others)} more" if others else ""
            said.append(f"down: {first}{more}")
        return "  ".join(said)


class StepClock:
    """Since when a step goes on, and what the trainer does in it."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = self._since_s = now_s
        self._does = ""

    def begin(self, now_s: float) -> None:
        """The step before has been reported."""
        self._begun_s, self._does = now_s, ""

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self._begun_s

    def headline(
        self, progress: StepProgress, step: str, left_s: float | None, now_s: float
    ) -> str:
        """``step``: which one, in words; ``left_s``: of the run, None where nobody knows."""
        if progress.does != self._does:
            self._does, self._since_s = progress.does, now_s
        said = [step, duration(self.elapsed_s(now_s))]
        if progress.does:
            said.append(f"{progress.does} {duration(now_s - self._since_s)}")
        if left_s is not None:
            said.append(f"left {duration(left_s)}")
        return "  ".join(said)


def duration(seconds: float) -> str:
    """``12 s`` below two minutes, then ``1:02:03``; ``3 d 4 h`` from a day on."""
    whole = round(max(seconds, 0.0))
    if whole < 120:
        return f"{whole} s"
    days, rest = divmod(whole, 86_400)
    return f"{days} d {rest // 3600} h" if days else str(timedelta(seconds=whole))


class ProgressThread:
    """Shows where the run is every ``LOOK_EVERY_S`` seconds until it is closed."""

    def __init__(
        self, look: Callable[[], StepProgress], show: Callable[[StepProgress], object]
    ) -> None:
        self._look, self._show = look, show
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is shown from now on."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            self._show(self._look())
