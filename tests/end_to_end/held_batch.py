"""A run that hangs in the middle of a batch, to be ended there in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.event_log import read_events
from tests.end_to_end.proxy import GatedProxy
from tests.end_to_end.trainer_run import start_trainer, trainer_command

BATCH, NUM_GENERATIONS = 4, 4
SHORT, HELD = 12, 13  # prompt tokens; responses to the long prompts are held back
OPTIONS = (
    *(f"trainer.batch_size={BATCH}", f"rollout.num_generations={NUM_GENERATIONS}"),
    *("rollout.max_tokens=16", "checkpoint.every_steps=0"),
)


class MarkedRun:
    """A run whose processes are found again by a mark in their environment."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._mark = f"EASYRL_TEST_RUN={os.getpid()}-{time.monotonic_ns()}"
        self.log = log
        self.process = start_trainer(command, log, **dict([self._mark.split("=")]))

    def pids(self, words: str = "") -> list[int]:
        """Living processes of the run whose command line holds ``words``."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    not entry.name.isdigit()
                    or (entry / "environ").read_bytes().find(self._mark.encode()) < 0
                ):
                    continue
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and words in (entry / "cmdline").read_text().replace("\0", " "):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return sorted(found)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The status, when every process of the run has ended."""
        deadline = time.monotonic() + timeout_s
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"goes on:\n{self.log.read_text()[-5000:]}") from None
        while left := self.pids():
            assert time.monotonic() < deadline, (left, self.log.read_text()[-5000:])
            time.sleep(0.1)
        return self.process.returncode

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


class HeldBatch:
    """A run that waits in the middle of its second batch: two groups are there, two never come."""

    def __init__(self, tmp_path: Path, model: Path, url: str) -> None:
        self.run_dir, self.log = tmp_path / f"stop-{time.monotonic_ns()}", tmp_path / "log"
        self._model = model
        self._prompts = tmp_path / "prompts.jsonl"
        short = write_prompts(tmp_path / "short", BATCH + BATCH // 2, SHORT).read_text()
        long = write_prompts(tmp_path / "long", BATCH // 2, HELD, seed=1).read_text()
        self._prompts.write_text(short + long)
        self.proxy = GatedProxy(url, held=lambda token_ids: len(token_ids) == HELD)
        self._runs: list[MarkedRun] = []

    def command(self, *options: str, num_ranks: int = 0) -> list[str]:
        return trainer_command(
            self.run_dir,
            self._model,
            self._prompts,
            [self.proxy.url],
            *OPTIONS,
            *options,
            num_ranks=num_ranks,
        )

    def start(self, *options: str, num_ranks: int = 0) -> MarkedRun:
        """Returns when the second batch hangs."""
        run = MarkedRun(self.command(*options, num_ranks=num_ranks), self.log)
        self._runs.append(run)
        deadline = time.monotonic() + 120
        finished = BATCH + BATCH // 2
        while self.proxy.num_waiting < BATCH // 2 * NUM_GENERATIONS or (
            len(self.events("group_ready")) < finished
        ):
            assert run.process.poll() is None, self.log.read_text()[-5000:]
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.05)
        return run

    def events(self, name: str) -> list[dict]:
        """Of all ranks and attempts."""
        logs = sorted(self.run_dir.glob("events-rank*.jsonl"))
        return [event for log in logs for event in read_events(log) if event["event"] == name]

    def trainings(self) -> Counter[int]:
        """How often each prompt was in a committed step."""
        closed = self.events("group_closed")
        return Counter(event["index"] for event in closed if event["outcome"] == "trained")

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("*"))

    def weights_left(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"easyrl-{self.run_dir.name}*"))

    def close(self) -> None:
        for run in self._runs:
            run.kill()
        self.proxy.close()
