"""Runs that no healthy endpoint takes part in: how they have to end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.parts.chaos.attempt import Attempt
from benchmarks.parts.hostile.behaviour import EndpointBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.endpoint import HostileEndpoint
from benchmarks.parts.run_watch import RunWatch

UNUSABLE, GOES_ON = 2, 75  # exit statuses
SENTENCES = {UNUSABLE: "no endpoint is up", GOES_ON: "no usable endpoint"}
LIMIT_S = 120.0
TICK_S = 0.1
BEFORE = ("internal-errors", "html", "random-bytes", "key-demanded")
AFTER = ("unavailable", "empty-body", "reset-at-once", "refuse-everything")


@dataclass(frozen=True)
class Alone:
    """A run whose endpoints are all hostile.

    Attributes:
        from_start: else from when the first batch was closed.
    """

    name: str
    behaviours: tuple[EndpointBehaviour, ...]
    from_start: bool

    @property
    def status(self) -> int:
        """That the run has to end with: usable settings may not be there, or a resume helps."""
        return UNUSABLE if self.from_start else GOES_ON

    def watch(
        self,
        attempt: Attempt,
        run_dir: Path,
        log: Path,
        endpoints: Sequence[HostileEndpoint],
        patience_s: float,
    ) -> str | None:
        """Follows the run to its end; what is wrong with it, in words."""
        watch = RunWatch(run_dir, log, 2 * LIMIT_S)
        until_s = time.monotonic() + LIMIT_S
        try:
            while attempt.launcher.poll() is None:
                time.sleep(TICK_S)
                watch.look()
                if self.from_start or watch.num_steps:
                    for endpoint in endpoints:
                        endpoint.may_act = True
                if time.monotonic() > until_s:
                    return f"did not end within {LIMIT_S:g} s"
        finally:
            attempt.kill()
        return self.problem(attempt.launcher.returncode, attempt.said())

    def problem(self, status: int, said: str) -> str | None:
        """What is wrong with how it ended."""
        told = [line for line in said.splitlines() if line.startswith("easyrl: ")]
        sentences = [line for line in told if SENTENCES[self.status] in line]
        if status != self.status:
            return f"ended with status {status}, not {self.status}:\n{said[-2000:]}"
        # at the start of a line: an endpoint may send the word
        has_traceback = any(line.startswith("Traceback") for line in said.splitlines())
        if has_traceback or len(sentences) != 1 or sentences != told[-1:]:
            return f"did not end with one sentence:\n{said[-2000:]}"
        print(f"nobody healthy, {self.name}: {status}, {sentences[0][:200]}")
        return None


def runs_alone(most: int) -> list[Alone]:
    """Before the first batch, and behind it; of at most so many endpoints each."""
    before, after = (_behaviours(names[:most]) for names in (BEFORE, AFTER))
    return [Alone("from-the-start", before, True), Alone("after-a-batch", after, False)]


def _behaviours(names: Sequence[str]) -> tuple[EndpointBehaviour, ...]:
    return tuple(cast(EndpointBehaviour, BEHAVIOURS[name]) for name in names)
