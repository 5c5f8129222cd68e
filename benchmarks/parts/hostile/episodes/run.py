"""One training run among hostile environments, killed once in mid-batch and resumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.hostile.run import LAST_WORDS, MEMORY_LOOK_S, TICK_S, Outcome
from benchmarks.parts.memory_peak import MemoryPeak, process_tree
from benchmarks.parts.run_phase import GENERATING, TRAINING, RunPhase
from benchmarks.parts.run_watch import Event, RunStuck, RunWatch

KILL_BEHIND = 2  # batches closed
HOST = "environments/host.py"  # in the command of a host, and of what it forks
GONE_WITHIN_S = 10.0  # all that a run has started, behind its end


class EpisodesRun:
    """Starts the trainer, kills it with all its processes in the third batch, and resumes it."""

    def __init__(
        self, name: str, start: StartAttempt, run_dir: Path, log: Path, patience_s: float
    ) -> None:
        self._name, self._start = name, start
        self._watch = RunWatch(run_dir, log, patience_s, self._take)
        self._phase, self._num_ready = RunPhase(), 0
        self._memory, self._memory_look_s = MemoryPeak(), 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        began_s = time.monotonic()
        if self._attempt(0, kill=True):
            self._attempt(1, kill=False)
        self.outcome.peak_mb = self._memory.peak_mb
        self.outcome.seconds = time.monotonic() - began_s
        return self.outcome

    def _attempt(self, number: int, *, kill: bool) -> bool:
        """Whether it was killed, as planned."""
        attempt = self._start(number, number > 0)
        self._phase.begin_attempt()
        self._watch.progress_s = time.monotonic()
        try:
            killed = self._follow(attempt, kill)
            if not killed:
                self._wait_for_all(attempt, number)
        except RunStuck as stuck:
            dump = self._watch.dump(attempt.launcher)[-9000:]
            self._complain(number, f"{stuck}\n{dump}")
            return False
        finally:
            attempt.kill()
        status = attempt.launcher.returncode
        self.outcome.statuses.append("killed" if killed else status)
        if not killed and status:
            self._complain(number, f"ended with status {status}:\n{attempt.said(LAST_WORDS)}")
        if not killed and kill and not status:
            self._complain(number, "was over before it could be killed")
        return killed

    def _follow(self, attempt: Attempt, kill: bool) -> bool:
        while attempt.launcher.poll() is None:
            time.sleep(TICK_S)
            self._watch.look()
            if time.monotonic() - self._memory_look_s >= MEMORY_LOOK_S:
                self._memory.look(_ours(process_tree(attempt.launcher.pid)))
                self._memory_look_s = time.monotonic()
            is_open = self._phase.name in (GENERATING, TRAINING) and self._num_ready > 0
            if kill and is_open and self._phase.closed_batches >= KILL_BEHIND:
                return True
        self._watch.look()
        return False

    def _wait_for_all(self, attempt: Attempt, number: int) -> None:
        until_s = time.monotonic() + GONE_WITHIN_S
        while left := attempt.members():
            if time.monotonic() > until_s:
                names = ", ".join(" ".join(process.cmdline())[:80] for process in left)
                self._complain(number, f"left {len(left)} processes behind: {names}")
                return
            time.sleep(TICK_S)

    def _take(self, event: Event) -> None:
        self._phase.take(event)
        kind = event["event"]
        self._num_ready = 0 if kind == "batch_dispatched" else self._num_ready
        self._num_ready += kind == "group_ready"

    def _complain(self, number: int, what: str) -> None:
        blamed = self.outcome.resume_failed if number else self.outcome.crashed
        blamed.append(f"{self._name}, attempt {number}: {what}")


def _ours(tree: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Trainer, gateway, fetchers and workers: what an environment takes in its host is its own."""
    return [process for process in tree if HOST not in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
