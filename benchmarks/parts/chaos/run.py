"""A run that is hit again and again, and resumed each time, until its prompts are trained."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.chaos.plan import Strike
from benchmarks.parts.fault_injection import Victim
from benchmarks.parts.run_phase import RunPhase
from benchmarks.parts.run_watch import RunStuck, RunWatch
from easyrl.inference_client.servers.managed.server_process import ServerProcess

TICK_S = 0.03
END_TIMEOUT_S = 60.0  # from a strike until no process of the attempt is left
SAVED = "is saved; go on with --resume"
ENDPOINT_GONE_S = 3.0  # at most; it also has to start


@dataclass(frozen=True)
class Pace:
    """Of the run that nobody disturbs: strikes fall within such times."""

    start_s: float  # from the start to the first batch
    batch_s: float


@dataclass
class Hit:
    """A strike that has fallen."""

    strike: Strike
    attempt: int
    at_s: float  # since the first attempt began
    what: str  # what was hit
    phase: str  # of the run, one of ``run_phase.PHASES``
    writes_checkpoint: bool
    closed_batches: int
    status: int | None = None  # of the launcher then; None: it was not the trainer that was hit
    end_s: float | None = None  # from the strike to the attempt's last process
    saved: bool = False  # the attempt wrote a checkpoint before it ended

    def __str__(self) -> str:
        return (
            f"{self.at_s:7.1f} s  batch {self.closed_batches:3d}  attempt {self.attempt:3d}  "
            f"{self.strike.how} ({self.what}) while {self.phase}"
        )


@dataclass
class _Line:
    """Strikes that have not fallen, and when the next one does, once it is due."""

    strikes: deque[Strike]
    next_at_s: float | None = None


class AttemptFailed(RuntimeError):
    """An attempt ended, or did not, for no reason that the strikes give."""


class ChaosRun:
    """Starts attempts, strikes at them and at the servers as planned, and starts the next.

    Args:
        start_attempt: starts the trainer.
        servers: the endpoints.
        run_dir: of the run.
        strikes: in the order in which they fall; those at the endpoints have one of their own.
        pace: how long what takes.
        patience_s: how long the run may do nothing.
    """

    def __init__(
        self,
        start_attempt: StartAttempt,
        servers: Sequence[ServerProcess],
        run_dir: Path,
        log: Path,
        strikes: Sequence[Strike],
        pace: Pace,
        patience_s: float,
    ) -> None:
        self.hits: list[Hit] = []
        self.num_attempts = 0
        self._start_attempt = start_attempt
        self._victims = [Victim(server) for server in servers]
        self._metrics = run_dir / "metrics.jsonl"
        self._lines = [
            _Line(deque(s for s in strikes if s.hits_trainer == trainer))
            for trainer in (False, True)
        ]
        self._pace = pace
        self._phase = RunPhase()
        self._watch = RunWatch(run_dir, log, patience_s, self._phase.take)

    def run(self) -> None:
        """Returns when the run has ended well. Raises ``AttemptFailed``, ``RunStuck``."""
        self._began_s = time.monotonic()
        while True:
            attempt = self._begin_attempt()
            try:
                hit = self._follow(attempt)
                if hit is None:
                    return
                hit.status, hit.end_s = self._wait_for_end(attempt)
                hit.saved = SAVED in attempt.said()
            except RunStuck as stuck:
                raise RunStuck(f"{stuck}\n{self._watch.dump(attempt.launcher)}") from stuck
            finally:
                attempt.kill()

    def _begin_attempt(self) -> Attempt:
        # before the metrics are there, no run is: there is nothing to resume
        attempt = self._start_attempt(self.num_attempts, self._metrics.exists())
        self.num_attempts += 1
        self._watch.look()
        self._phase.begin_attempt()
        self._watch.progress_s = time.monotonic()
        return attempt

    def _follow(self, attempt: Attempt) -> Hit | None:
        """Until the trainer is hit, or the run has come to its end: None."""
        while True:
            self._tick()
            if attempt.launcher.poll() is not None:
                if attempt.launcher.returncode != 0:
                    raise AttemptFailed(
                        f"attempt {attempt.number} ended by itself with status "
                        f"{attempt.launcher.returncode}\n{attempt.said()}"
                    )
                if self._still_running(attempt):
                    raise AttemptFailed(f"processes of attempt {attempt.number} are left behind")
                return None
            for line in self._lines:
                hit = self._strike_if_due(attempt, line)
                if hit is not None and hit.strike.hits_trainer:
                    return hit

    def _tick(self) -> None:
        time.sleep(TICK_S)
        for victim in self._victims:
            victim.follow_up()
        self._watch.look()

    def _wait_for_end(self, attempt: Attempt) -> tuple[int, float]:
        """Status, and seconds until nothing of ``attempt`` runs any more."""
        hit_s = time.monotonic()
        while not attempt.has_ended:
            self._tick()
            if time.monotonic() - hit_s > END_TIMEOUT_S:
                left = [" ".join(process.cmdline()[:6]) for process in attempt.members()]
                raise AttemptFailed(
                    f"attempt {attempt.number} is still there {END_TIMEOUT_S:.0f} s after "
                    f"it was hit ({self.hits[-1]}): {left}\n{self._watch.dump(attempt.launcher)}"
                )
        return attempt.launcher.returncode, time.monotonic() - hit_s

    def _still_running(self, attempt: Attempt) -> bool:
        """Whether processes outlive the launcher for more than a moment."""
        until_s = time.monotonic() + 5
        while not attempt.has_ended and time.monotonic() < until_s:
            time.sleep(TICK_S)
        return not attempt.has_ended

    # ---- strikes -----------------------------------------------------------------------------

    def _strike_if_due(self, attempt: Attempt, line: _Line) -> Hit | None:
        if not line.strikes or self._phase.closed_batches < line.strikes[0].due:
            return None
        strike, now_s = line.strikes[0], time.monotonic()
        if not strike.at_start and not self._phase.has_dispatched:
            return None
        if line.next_at_s is None:
            line.next_at_s = now_s + strike.moment * self._window_s(attempt, line)
        if now_s < line.next_at_s:
            return None
        what = (
            self._hit_trainer(attempt, strike) if strike.hits_trainer else self._hit_server(strike)
        )
        if what is None:
            return None  # no endpoint is there
        line.strikes.popleft()
        line.next_at_s = None
        self.hits.append(
            Hit(
                strike,
                attempt.number,
                now_s - self._began_s,
                what,
                self._phase.name,
                self._phase.writes_checkpoint,
                self._phase.closed_batches,
            )
        )
        print(self.hits[-1])
        return self.hits[-1]

    def _window_s(self, attempt: Attempt, line: _Line) -> float:
        """Within which the next strike falls, from now on: a start, or up to two batches."""
        age_s = time.monotonic() - attempt.started_s
        if line.strikes[0].at_start and not self._phase.has_dispatched:
            return max(0.0, self._pace.start_s - age_s)
        left = line.strikes[-1].due + 1 - self._phase.closed_batches  # fewer than strikes: faster
        return 2 * self._pace.batch_s * max(0.0, min(1.0, left / len(line.strikes)))

    def _hit_trainer(self, attempt: Attempt, strike: Strike) -> str:
        assert strike.how not in ("endpoint killed", "endpoint ended")
        return attempt.strike(strike.how, strike.victim)

    def _hit_server(self, strike: Strike) -> str | None:
        live = [victim for victim in self._victims if victim.is_live]
        if not live:
            return None
        victim = live[int(strike.victim * len(live))]
        kind = "kill" if strike.how == "endpoint killed" else "end"
        victim.strike(kind, strike.gone * ENDPOINT_GONE_S)
        return victim.server.url
