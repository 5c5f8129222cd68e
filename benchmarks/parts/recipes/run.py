"""One run of a recipe on the demo's task, and how often the trained model is right."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.recipes.ready_files import ReadyFile
from benchmarks.parts.recipes.rows import Kind, Measured
from benchmarks.parts.worktree import ROOT
from easyrl.demo.build_model import build_model
from easyrl.demo.build_teacher import build_teacher
from easyrl.demo.held_out import held_out_accuracy
from easyrl.demo.servers import MAX_MODEL_LEN
from easyrl.demo.task import write_splits
from easyrl.metrics.trackers import read_metrics

NUM_SMOOTHED = 5  # batches, of an explained variance
MAX_TOKENS = 40  # of a held-out answer; careful columns with every carry take 31
SERVER = f"{{engine: embedded, options: ['--max-model-len={MAX_MODEL_LEN}']}}"


class Task:
    """The demo's model, teacher and problems, each made once in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = folder / "base_model"
        self.teacher = folder / "teacher"
        self.train, self.heldout = write_splits(folder / "data", seed=0)
        _make_once(self.model, lambda unfinished: build_model(unfinished, seed=0))

    def start(self) -> Measured:
        """Of the model that all runs start from."""
        return Measured(self._accuracy(self.model), 0.0, [])

    def of_teacher(self) -> Measured:
        """Of the model that the distillation learns from, made if it is not there."""
        self._make_teacher()
        return Measured(self._accuracy(self.teacher), 0.0, [])

    def run(self, file: ReadyFile, kind: Kind, seed: int, num_batches: int) -> Measured:
        """Trains with a server of the run's own. Raises ``RuntimeError`` if the run fails.

        What it has written is removed, if it was a good one; its log stays.
        """
        run_dir = self._folder / f"{file.recipe}-{kind}-{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        if file.has_teacher:
            self._make_teacher()
        environment = {key: value for key, value in os.environ.items() if key not in THREADS}
        start = time.monotonic()
        run_command(
            self.command(file, kind, seed, num_batches, run_dir),
            run_dir.with_suffix(".log"),
            environment | {"DS_ACCELERATOR": "cpu"},
            ROOT,
        )
        seconds = time.monotonic() - start
        metrics = read_metrics(run_dir / "metrics.jsonl")
        measured = Measured(
            self._accuracy(run_dir / "model"),
            round(seconds, 1),
            [round(step["reward/mean"], 4) for step in metrics if "reward/mean" in step],
            explained_variance(metrics),
            clip_fraction(metrics),
        )
        shutil.rmtree(run_dir)
        return measured

    def command(
        self, file: ReadyFile, kind: Kind, seed: int, num_batches: int, run_dir: Path
    ) -> list[str]:
        """``easyrl train`` with the ready file; nothing of its recipe is set otherwise."""
        settings = {
            "run.output_dir": run_dir.absolute(),
            "run.seed": seed,
            "run.mode": "sync" if kind == "sync" else "async",
            "model.path": self.model.absolute(),
            "data.files": f"[{self.train.absolute()}]",
            "inference.endpoints": "[]",
            "inference.launch": SERVER,
            "trainer.max_steps": file.num_steps(num_batches),
            "scoring.shuffle_rewards": file.shuffle if kind == "shuffled" else "false",
            "evaluation": "null",  # the held-out problems are measured behind the run
        }
        if file.has_teacher:
            settings["recipe.teacher"] = self.teacher.absolute()
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return [sys.executable, "-m", "easyrl", "train", str(file.path), *overrides]

    def _make_teacher(self) -> None:
        _make_once(self.teacher, lambda unfinished: build_teacher(unfinished, seed=0))

    def _accuracy(self, model: Path) -> float:
        return held_out_accuracy(model, self.heldout, seed=0, max_tokens=MAX_TOKENS)


def explained_variance(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """As ``Measured`` has it, of a run's metrics."""
    key = "critic/explained_variance"
    found = [batch[key] for batch in metrics if key in batch]
    starts = range(len(found) - NUM_SMOOTHED + 1)
    means = [statistics.mean(found[start : start + NUM_SMOOTHED]) for start in starts]
    return round(max(means), 4) if means else None


def clip_fraction(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """As ``Measured`` has it, of a run's metrics. No token is counted at two bounds."""
    of_batches = [
        [value for name, value in batch.items() if name.startswith("policy/clip_")]
        for batch in metrics
    ]
    return max((sum(shares) for shares in of_batches if shares), default=None)


def _make_once(folder: Path, build: Callable[[Path], object]) -> None:
    """A folder that is there is a whole one: what was interrupted has another name."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    build(unfinished)
    unfinished.rename(folder)
