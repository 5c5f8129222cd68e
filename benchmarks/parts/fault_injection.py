"""Kills, ends, stops and restarts inference servers at random moments, and notes what it did."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.runtime.process_guard import session_members

Kind = Literal["kill", "end", "stop"]  # SIGKILL, SIGTERM, SIGSTOP
TICK_S = 0.1


@dataclass
class Fault:
    """One server was hit while it answered. Times are ``time.monotonic()``."""

    kind: Kind
    url: str
    at_s: float
    both: bool  # all servers were hit at once
    returned_s: float | None = None  # it was started again, or let go on (stop)
    answered_s: float | None = None  # it answered ``/health`` again


@dataclass(frozen=True)
class Schedule:
    """How often and how long, uniform between two bounds, seconds."""

    calm_s: tuple[float, float]  # between two strikes
    gone_s: tuple[float, float] = (0.0, 5.0)  # killed, not yet started again
    stopped_s: tuple[float, float] = (8.0, 15.0)  # longer than the trainer's patience
    kill_share: float = 0.45
    both_share: float = 0.4  # of the strikes at a moment when all are live


class Victim:
    """A server and what is being done to it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.fault: Fault | None = None  # until it answers again
        self.return_at_s = 0.0

    @property
    def is_live(self) -> bool:
        return self.fault is None and not self.server.has_ended and self.server.is_healthy()

    def strike(self, kind: Kind, lasting_s: float, both: bool = False) -> Fault:
        now_s = time.monotonic()
        if kind == "kill":
            self.server.kill()
        elif kind == "end":
            self.server.process.terminate()
        else:
            send_to_session(self.server, signal.SIGSTOP)
        self.fault = Fault(kind, self.server.url, now_s, both)
        self.return_at_s = now_s + lasting_s
        return self.fault

    def follow_up(self) -> None:
        """Lets it return when its time has come; the fault is over when it answers."""
        fault = self.fault
        if fault is None or time.monotonic() < self.return_at_s:
            return
        if fault.returned_s is None:
            if fault.kind == "stop":
                send_to_session(self.server, signal.SIGCONT)
            else:
                self.server.restart(wait=False)
            fault.returned_s = time.monotonic()
        elif self.server.has_ended:
            raise RuntimeError(f"{fault.url} did not start again{self.server.failure_report()}")
        elif self.server.is_healthy():
            fault.answered_s = time.monotonic()
            self.fault = None

    def let_go(self) -> None:
        if self.fault is not None and self.fault.kind == "stop" and not self.server.has_ended:
            send_to_session(self.server, signal.SIGCONT)


class FaultInjector(threading.Thread):
    """Hits live servers from ``start`` until ``end``; ``faults`` lists what it did.

    ``error`` is set if a server could not be started again.
    """

    def __init__(self, servers: Sequence[ServerProcess], seed: int, schedule: Schedule) -> None:
        super().__init__(name="fault-injector", daemon=True)
        self.faults: list[Fault] = []
        self.error: Exception | None = None
        self._schedule = schedule
        self._victims = [Victim(server) for server in servers]
        self._random = random.Random(seed)
        self._ended = threading.Event()

    def end(self) -> None:
        """No more strikes; what is stopped goes on. Returns when the thread has ended."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        try:
            strike_at_s = self._after_a_calm()
            while not self._ended.wait(TICK_S):
                for victim in self._victims:
                    victim.follow_up()
                if time.monotonic() >= strike_at_s:
                    self._strike()
                    # also if it has to wait: else what returns would be hit the moment it does
                    strike_at_s = self._after_a_calm()
        except Exception as error:  # for the main thread, which ends the run
            self.error = error
        finally:
            for victim in self._victims:
                victim.let_go()

    def _after_a_calm(self) -> float:
        return time.monotonic() + self._draw(self._schedule.calm_s)

    def _strike(self) -> None:
        """Hits one live server, or all of them at once if all are live."""
        live = [victim for victim in self._victims if victim.is_live]
        if not live:
            return
        both = len(live) > 1 and self._random.random() < self._schedule.both_share
        for victim in live if both else [self._random.choice(live)]:
            kill = self._random.random() < self._schedule.kill_share
            lasting = self._schedule.gone_s if kill else self._schedule.stopped_s
            fault = victim.strike("kill" if kill else "stop", self._draw(lasting), both)
            self.faults.append(fault)

    def _draw(self, bounds: tuple[float, float]) -> float:
        return self._random.uniform(*bounds)


def send_to_session(server: ServerProcess, number: signal.Signals) -> None:
    """``number`` to the server and everything that it forked."""
    for pid in session_members(server.process.pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
