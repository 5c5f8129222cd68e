"""The loop of attempts: strikes fall as planned, and what they do not explain is an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from benchmarks.parts.chaos.plan import Strike
from benchmarks.parts.chaos.run import AttemptFailed, ChaosRun, Pace
from benchmarks.parts.chaos.verdict import compare_runs, weights_hash


class FakeAttempt:
    """Closes a batch each time it is looked at; ends when it is hit, or after the last batch."""

    def __init__(self, number: int, resume: bool, run_dir: Path, last: int, status: int) -> None:
        self.number, self.resume = number, resume
        self.launcher = self
        self.pid = 2**22  # nobody's
        self.returncode: int | None = None
        self.started_s = 0.0
        self.strikes: list[str] = []
        self._run_dir, self._last, self._status = run_dir, last, status
        self._step = 0
        (run_dir / "metrics.jsonl").touch()

    def poll(self) -> int | None:
        if self.returncode is None:
            self._step += 1
            self._tell(event="batch_dispatched", num_recovered=0)
            self._tell(event="step", step=self._step, version=f"run:0:{self._step - 1}")
            if self._step == self._last:
                self.returncode = self._status
        return self.returncode

    @property
    def has_ended(self) -> bool:
        return self.returncode is not None

    def strike(self, how: str, victim: float) -> str:
        self.strikes.append(how)
        self.returncode = 0 if how.endswith("ended") else -9
        return "all"

    def said(self, characters: int = 0) -> str:
        ended = self.returncode == 0 and bool(self.strikes)
        return "step 1 is saved; go on with --resume" if ended else "its last words"

    def kill(self) -> None:
        pass

    def members(self) -> list[object]:
        return []

    def _tell(self, **event: object) -> None:
        with (self._run_dir / "events-rank0.jsonl").open("ab") as file:
            file.write(orjson.dumps({"t": 0.0, **event}) + b"\n")


def chaos(
    run_dir: Path, strikes: Sequence[Strike], *, last: int = 6, status: int = 0
) -> tuple[ChaosRun, list[FakeAttempt]]:
    attempts: list[FakeAttempt] = []

    def start(number: int, resume: bool) -> FakeAttempt:
        attempts.append(FakeAttempt(number, resume, run_dir, last, status))
        return attempts[-1]

    log = run_dir / "log"
    log.touch()
    pace = Pace(start_s=0.0, batch_s=0.0)
    return ChaosRun(start, [], run_dir, log, strikes, pace, patience_s=1e6), attempts


def test_strikes_fall_when_due_and_the_next_attempt_resumes(tmp_path: Path) -> None:
    planned = [
        Strike("all killed", 0, False, 0.0, 0.0, 0.0),
        Strike("job ended", 3, False, 0.0, 0.0, 0.0),
    ]
    run, attempts = chaos(tmp_path, planned)
    run.run()
    assert [attempt.resume for attempt in attempts] == [False, True, True]
    assert [attempt.strikes for attempt in attempts] == [["all killed"], ["job ended"], []]
    assert [(hit.status, hit.saved) for hit in run.hits] == [(-9, False), (0, True)]
    assert run.hits[1].closed_batches >= 3 and run.num_attempts == 3


def test_an_attempt_that_fails_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    run, _ = chaos(tmp_path, [], status=1)
    with pytest.raises(
        AttemptFailed, match="attempt 0 ended by itself with status 1\nits last words"
    ):
        run.run()


# ---- comparing ---------------------------------------------------------------------------------


def write_run(folder: Path, weight: float, lines: Sequence[dict[str, float]]) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    (folder / "model").mkdir(parents=True)
    tensors = {"a": np.array([weight], np.float32), "b": np.zeros((2, 3), np.float32)}
    save_file(tensors, folder / "model" / "model.safetensors")
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in lines))
    return folder


LINES = [{"step": 0, "time/sync_s": 1.0}, {"step": 1, "loss": 0.25, "time/sync_s": 1.0}]


def test_times_may_differ_and_nothing_else(tmp_path: Path) -> None:
    undisturbed = write_run(tmp_path / "a", 1.0, LINES)
    slower = [{**line, "time/sync_s": 2.0} for line in LINES]
    assert compare_runs(undisturbed, write_run(tmp_path / "b", 1.0, slower)).is_equal
    off = [LINES[0], {**LINES[1], "loss": 0.25 + 1e-16 + sys.float_info.epsilon}]
    compared = compare_runs(undisturbed, write_run(tmp_path / "c", 1.0, off))
    assert compared.differences == (f"step 1: loss is {off[1]['loss']}, undisturbed 0.25",)
    compared = compare_runs(undisturbed, write_run(tmp_path / "d", 1.0, LINES[:1]))
    assert compared.differences == ("steps [1] are in one of the metrics only",)


def test_a_last_bit_of_a_weight_is_seen(tmp_path: Path) -> None:
    undisturbed = write_run(tmp_path / "a", 1.0, LINES)
    other = write_run(tmp_path / "b", 1.0000001, LINES)
    assert "final weights are" in compare_runs(undisturbed, other).differences[0]
    assert weights_hash(undisturbed / "model") != weights_hash(other / "model")


def test_a_step_that_is_reported_twice_is_a_difference(tmp_path: Path) -> None:
    undisturbed = write_run(tmp_path / "a", 1.0, LINES)
    twice = write_run(tmp_path / "b", 1.0, [*LINES, LINES[1]])
    compared = compare_runs(undisturbed, twice)
    assert compared.differences == ("1 steps are in the metrics twice",)
