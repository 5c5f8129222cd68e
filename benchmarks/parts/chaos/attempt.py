"""One start of the trainer with all its processes, and the ways to hit it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.parts.chaos.plan import How
from benchmarks.parts.launched_run import start_trainer

MARK = "EASYRL_CHAOS_ATTEMPT"  # environment variable, which all that an attempt starts inherits


class Attempt:
    """Every process of it is known by a mark in its environment, whoever its parent is.

    Attributes:
        launcher: the ``deepspeed`` command.
        started_s: ``time.monotonic()``.
    """

    def __init__(
        self, number: int, config: str, overrides: Sequence[str], log: Path, num_ranks: int
    ) -> None:
        self.number = number
        self.log = log
        self._mark = f"{os.getpid()}-{number}"
        self._log_start = log.stat().st_size if log.exists() else 0
        self.started_s = time.monotonic()
        self.launcher = start_trainer(
            config, overrides, log, num_ranks=num_ranks, **{MARK: self._mark}
        )

    def members(self) -> list[psutil.Process]:
        """Running processes of this attempt; zombies are not."""
        return [process for process in psutil.process_iter() if self._is_member(process)]

    def ranks(self) -> list[psutil.Process]:
        """The training processes, in the order of their ranks; not there at the very start."""
        found = [(_rank(process), process) for process in self.members()]
        # what a rank forked has its command line until it runs its own
        ranks = [(rank, p) for rank, p in found if rank and not _rank(_parent(p))]
        return [process for _, process in sorted(ranks, key=lambda pair: pair[0])]

    @property
    def has_ended(self) -> bool:
        return self.launcher.poll() is not None and not self.members()

    def strike(self, how: How, victim: float) -> str:
        """Hits the attempt; what was hit. A rank that does not exist yet is hit in its launcher."""
        number = signal.SIGKILL if how.endswith("killed") else signal.SIGTERM
        if how == "all killed":
            self.kill()
            return "all"
        if how == "job ended":
            _send_to_group(self.launcher.pid, number)
            return "process group"
        if how.startswith("rank") and (ranks := self.ranks()):
            rank = int(victim * len(ranks))
            _send(ranks[rank].pid, number)
            return f"rank {rank}"
        self.launcher.send_signal(number)
        return "launcher"

    def kill(self) -> None:
        """Every process at once; also those that are started meanwhile."""
        while members := self.members():
            for process in members:
                _send(process.pid, signal.SIGKILL)
            self.launcher.poll()
            time.sleep(0.01)
        self.launcher.wait()

    def said(self, characters: int = 6000) -> str:
        """The end of what this attempt has printed."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")[-characters:]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            mark = process.environ().get(MARK)
            return mark == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


StartAttempt = Callable[[int, bool], Attempt]  # number, resume


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _rank(process: psutil.Process | None) -> str:
    """The word of its command line that tells which rank it is; empty if it is none."""
    try:
        words = [] if process is None else process.cmdline()
    except psutil.Error:
        return ""
    return next((word for word in words if word.startswith("--local_rank=")), "")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _send_to_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
