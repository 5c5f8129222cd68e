"""What a finished run has trained, and in what time, from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.run_files import METRICS_FILE

STEP_S = "time/step_s"


@dataclass(frozen=True)
class FinishedRun:
    """The counted steps of a run.

    Attributes:
        steps: metrics of each.
        num_generations: G, responses of a prompt.
        devices: of training and inference together; a server on four devices counts four.
    """

    run_dir: Path
    steps: Sequence[dict[str, float]]
    num_generations: int
    devices: int

    @property
    def tokens(self) -> float:
        """Of the trained sequences, each with its prompt, whether that was shared or not."""
        return sum(
            step["tokens/prompt"] * self.num_generations + step["tokens/response"]
            for step in self.steps
        )

    @property
    def packed_tokens(self) -> float:
        """That went through the model."""
        return sum(step["tokens/packed"] for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step[STEP_S] for step in self.steps)

    @property
    def training_s(self) -> float:
        """Forward and backward."""
        return sum(step["time/train_s"] for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tpspd(self) -> float:
        """Tokens trained per second per device, the paper's measure (§6)."""
        return self.tokens_per_s / self.devices

    @property
    def overlap_bound(self) -> float:
        """How much faster a synchronous run would be at most if its phases overlapped.

        Of each batch the shorter of generation G and training T is hidden behind the longer; all
        else stays. G: until the last group was there; T: from then to the optimizer step. For
        batches of these two phases alone that is (G + T) / max(G, T).
        """
        return self.seconds / sum(step[STEP_S] - _shorter_phase_s(step) for step in self.steps)


def read_run(run_dir: Path, num_generations: int, devices: int, *, skip: int = 0) -> FinishedRun:
    """``skip``: first steps that are not counted. Raises ``ValueError`` if no other is there."""
    path = run_dir / METRICS_FILE
    lines = read_metrics(path) if path.is_file() else []
    steps = [line for line in lines if STEP_S in line][skip:]
    if not steps:
        raise ValueError(f"{path}: has no step behind the first {skip}; look into the run's log")
    return FinishedRun(run_dir, steps, num_generations, devices)


def _shorter_phase_s(step: dict[str, float]) -> float:
    generation_s = step["time/last_group_s"]
    training_s = step["time/batch_s"] - generation_s - step["time/optimizer_s"]
    return max(0.0, min(generation_s, training_s))
