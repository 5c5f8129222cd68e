"""One training run among hostile endpoints, strangers and disks, with its kills and resumes."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.parts.chaos.attempt import Attempt, StartAttempt
from benchmarks.parts.hostile.behaviour import FileBehaviour, NotNow, SocketBehaviour
from benchmarks.parts.hostile.endpoint import HostileEndpoint
from benchmarks.parts.hostile.files import RunFiles
from benchmarks.parts.hostile.plan import Due, RunPlan
from benchmarks.parts.hostile.sockets import Listener, listeners
from benchmarks.parts.memory_peak import MemoryPeak, process_tree
from benchmarks.parts.run_phase import GENERATING, TRAINING, RunPhase
from benchmarks.parts.run_watch import Event, RunStuck, RunWatch
from easyrl.runtime.loop_thread import LoopThread

TICK_S = 0.05
MEMORY_LOOK_S = 0.5
KILL_PATIENCE_S = 1.0  # for a moment in which the open batch has groups on disk
MAX_INTERRUPTIONS = 4  # status 75 and a resume, each for an endpoint that is excluded then
INTERRUPTED, REFUSED = 75, 2
LAST_WORDS = 2500  # characters


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        happened: how often each behaviour did, by name; of a stranger's, the connections made.
        streamed: of an endpoint's, how often to a request for a stream of samples.
        met: the kinds of listeners that took a stranger's connections, by the behaviour's name.
        notes: what was done to files and sockets.
        crashed: why the run ended otherwise than it may, in words.
        resume_failed: likewise, of attempts with ``--resume``.
    """

    happened: Counter[str] = field(default_factory=Counter)
    streamed: Counter[str] = field(default_factory=Counter)
    met: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    notes: list[str] = field(default_factory=list)
    statuses: list[int | str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    resume_failed: list[str] = field(default_factory=list)
    peak_mb: float = 0.0
    seconds: float = 0.0

    @property
    def has_ended_well(self) -> bool:
        return not self.crashed and not self.resume_failed


class _Killed(Exception):  # noqa: N818 (not an error)
    """The attempt was killed, as planned."""


class HostileRun:
    """Starts the trainer, lets happen what the plan says, and resumes until the run has ended."""

    def __init__(
        self,
        plan: RunPlan,
        start_attempt: StartAttempt,
        endpoints: Sequence[HostileEndpoint],
        files: RunFiles,
        thread: LoopThread,
        log: Path,
        patience_s: float,
    ) -> None:
        self._start_attempt = start_attempt
        self._plan = plan
        self._endpoints = endpoints
        self._files = files
        self._thread = thread
        self._rng = random.Random(plan.seed)
        self._beside, self._kills = list(plan.beside), list(plan.kills)
        self._phase = RunPhase()
        self._ready = 0  # groups of the open batch
        self._watch = RunWatch(files.run_dir, log, patience_s, self._take)
        self._memory = MemoryPeak()
        self._memory_look_s = 0.0
        self._overdue_s: float | None = None  # since when a kill waits for its moment
        self._listeners: dict[tuple[int, int], Listener] = {}  # by process and port
        self._visits: list[tuple[str, str, Future[int]]] = []  # behaviour, kind of listener
        self.outcome = Outcome()

    def run(self) -> Outcome:
        began_s = time.monotonic()
        try:
            self._run()
        finally:
            self._finish()
            self.outcome.seconds = time.monotonic() - began_s
        return self.outcome

    def _run(self) -> None:
        outcome, number, interruptions = self.outcome, 0, 0
        refused_for: FileBehaviour | None = None
        while True:
            if refused_for is None:  # else the attempt shows that it is refused without
                self._files.put_back()
            attempt = self._begin(number)
            try:
                status = self._follow(attempt, calm=refused_for is not None)
            except _Killed:
                outcome.statuses.append("killed")
                attempt.kill()
                refused_for = self._damage()
                number += 1
                continue
            except RunStuck as stuck:
                self._complain(number, f"{stuck}\n{self._watch.dump(attempt.launcher)[-9000:]}")
                return
            finally:
                attempt.kill()
            outcome.statuses.append(status)
            said = attempt.said(LAST_WORDS)
            if refused_for is not None:
                if status != REFUSED or refused_for.refused not in said or "Traceback" in said:
                    self._complain(number, f"not refused ({refused_for.name}), {status}:\n{said}")
                    return
                self._files.put_back()
                refused_for = None
            elif status == INTERRUPTED and self._plan.may_end_75:
                interruptions += 1
                if interruptions > MAX_INTERRUPTIONS:
                    self._complain(number, f"ended with 75 again and again:\n{said}")
                    return
            elif status:
                self._complain(number, f"ended with status {status}:\n{said}")
                return
            else:
                self._files.put_back()  # for who reads the folder
                return
            number += 1

    def _complain(self, number: int, what: str) -> None:
        blamed = self.outcome.resume_failed if number else self.outcome.crashed
        blamed.append(f"run {self._plan.number}, attempt {number}: {what}")

    def _begin(self, number: int) -> Attempt:
        attempt = self._start_attempt(number, number > 0)
        self._watch.look()
        self._phase.begin_attempt()
        self._watch.progress_s = time.monotonic()
        return attempt

    def _follow(self, attempt: Attempt, *, calm: bool) -> int:
        """Until the attempt has ended; its status. Raises ``_Killed`` and ``RunStuck``."""
        while attempt.launcher.poll() is None:
            time.sleep(TICK_S)
            self._watch.look()
            self._look_at_memory(attempt)
            if calm or not self._watch.num_batches:
                continue
            for endpoint in self._endpoints:
                endpoint.may_act = True
            if self._phase.has_dispatched:
                self._do_beside(attempt)
                if self._is_time_to_kill():
                    raise _Killed
        self._watch.look()
        return attempt.launcher.returncode

    def _take(self, event: Event) -> None:
        self._phase.take(event)
        kind = event["event"]
        self._ready = 0 if kind == "batch_dispatched" else self._ready + (kind == "group_ready")

    def _look_at_memory(self, attempt: Attempt) -> None:
        if time.monotonic() - self._memory_look_s >= MEMORY_LOOK_S:
            self._memory.look(process_tree(attempt.launcher.pid))
            self._memory_look_s = time.monotonic()

    # ---- what happens to it ----------------------------------------------------------------------

    def _do_beside(self, attempt: Attempt) -> None:
        for due in [due for due in self._beside if self._phase.closed_batches >= due.batch]:
            behaviour = due.behaviour
            try:
                if isinstance(behaviour, SocketBehaviour):
                    tree = process_tree(attempt.launcher.pid)
                    self._visit(behaviour, listeners(tree, self._listeners))
                else:
                    self._note(behaviour, behaviour.damage(self._files, self._rng))
            except NotNow:
                continue
            self._beside.remove(due)

    def _visit(self, behaviour: SocketBehaviour, found: Sequence[Listener]) -> None:
        if not found:
            raise NotNow
        kinds = {listener.port: listener.kind for listener in found}
        self.outcome.notes.append(f"{behaviour.name}: {kinds}")
        for listener in found:
            rng = random.Random(self._rng.randrange(2**31))
            visit = behaviour.visit(listener, rng)
            made = self._thread.submit(visit)  # type: ignore[arg-type]
            self._visits.append((behaviour.name, listener.kind, made))

    def _is_time_to_kill(self) -> bool:
        """The open batch has groups on disk and is not complete; or that is waited for too long."""
        if not self._kills or self._phase.closed_batches < self._kills[0].batch:
            return False
        now_s = time.monotonic()
        self._overdue_s = self._overdue_s or now_s
        is_open = self._phase.name in (GENERATING, TRAINING) and self._ready > 0
        return is_open or now_s - self._overdue_s > KILL_PATIENCE_S

    def _damage(self) -> FileBehaviour | None:
        """What the disk does to the killed run; a behaviour that has to be refused."""
        self._overdue_s = None
        due = self._kills.pop(0)
        behaviour = due.behaviour
        assert isinstance(behaviour, FileBehaviour)
        try:
            self._note(behaviour, behaviour.damage(self._files, self._rng))
        except NotNow:  # at another moment, if there is one
            self._kills.insert(0, Due(behaviour, self._phase.closed_batches + 1))
            return None
        return behaviour if behaviour.refused else None

    def _note(self, behaviour: FileBehaviour, what: str) -> None:
        self.outcome.happened[behaviour.name] += 1
        self.outcome.notes.append(f"{behaviour.name}: {what}")

    def _finish(self) -> None:
        outcome = self.outcome
        for name, kind, visit in self._visits:
            try:
                made = visit.result(60)
            except OSError:  # the port was closed meanwhile
                continue
            outcome.happened[name] += made
            if made:
                outcome.met[name].add(kind)
        for endpoint in self._endpoints:
            endpoint.may_act = False
            if endpoint.behaviour is not None:
                outcome.happened[endpoint.behaviour.name] += endpoint.has_met
                outcome.streamed[endpoint.behaviour.name] += endpoint.streamed
            if endpoint.problem is not None:
                raise RuntimeError(f"{endpoint.behaviour} failed") from endpoint.problem
        outcome.peak_mb = self._memory.peak_mb
