"""One host process at a time and the rollouts in it: the trainer's end of ``host``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from easyrl.config import EnvironmentConfig
from easyrl.environments.failures import (
    EnvironmentFailed,
    EnvironmentUnreachable,
    HostDied,
    OutOfTurns,
)
from easyrl.runtime.workers.child_process import Child, start_command
from easyrl.runtime.workers.supervised_child import SupervisedChild

logger = logging.getLogger(__name__)

HOST_FILE = Path(__file__).with_name("host.py")
MOST_LINE_BYTES = 2**23  # a host bounds what it says; more is no host of ours
ALIVE_S = 5.0  # since the last beat


class ToolCallTime(NamedTuple):
    """What a tool took."""

    name: str
    start_s: float  # time.monotonic()
    end_s: float
    is_error: bool  # the model was told of one


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment says of a rollout that has ended."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)  # its metrics, by name
    turn_rewards: tuple[float, ...] | Mapping[str, float] = ()  # as answered, or by turn id
    tool_calls: tuple[ToolCallTime, ...] = ()


@dataclass(eq=False, slots=True)
class Rollout:
    """One that a host runs, or will when it is ready."""

    number: int
    message: bytes  # that starts it
    future: asyncio.Future[Outcome]
    sent_s: float | None = None  # time.monotonic() when a host was told


class LineTooLong(ValueError):
    """A line of more than ``MOST_LINE_BYTES``."""


class NoMessage(ValueError):
    """A line of JSON that is none of ``host``'s: a field lacks, or is of another type."""


class LineSplitter:
    """Cuts a stream of bytes into its lines."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        if len(rest) > MOST_LINE_BYTES:
            raise LineTooLong
        for line in lines:
            yield bytes(line)


class HostProcess(SupervisedChild):
    """Starts a host when a rollout needs one; its death fails the rollouts in it, and no others.

    ``mark`` is a variable in the environment of all that it starts.
    """

    def __init__(self, environment: EnvironmentConfig, mark: str) -> None:
        greeting = {
            "type": "environment",
            "kind": environment.kind,
            "settings": environment.model_dump(mode="json"),
            # another Python has packages of its own
            "path": None if environment.python else [str(folder) for folder in sys.path],
        }
        super().__init__("", orjson.dumps(greeting), {mark: ""})
        self.settings = environment
        self.rollouts: dict[int, Rollout] = {}
        self.overdue: dict[int, float] = {}  # cancelled and not yet gone: since when
        self.is_ready = False  # the present process has loaded the environment and is to go on
        self._was_ready = False
        self.max_rollouts: int | None = None  # that may be open, as far as the host knows
        self.num_hung_threads = 0  # of the present process, whose calls did not end in their time
        self.is_retiring = False  # has a rollout that will not end; gets no other
        self.asked_s = time.monotonic()  # when the present process was started
        self._last_beat_s = 0.0
        self._waiting: list[asyncio.Future[None]] = []
        self._logged: set[tuple[str, str]] = set()

    # -- the process

    def start_process(self) -> Child:
        self.asked_s = time.monotonic()
        python = str(self.settings.python or sys.executable)
        return start_command(
            lambda descriptor: [python, str(HOST_FILE), str(descriptor), str(os.getpid())],
            self._environment,
        )

    def new_splitter(self) -> LineSplitter:
        return LineSplitter()

    def encoded(self, payload: bytes) -> bytes:
        return payload + b"\n"

    def buffer_updated(self, nbytes: int) -> None:
        try:
            super().buffer_updated(nbytes)
        except (LineTooLong, NoMessage, orjson.JSONDecodeError) as error:
            if self._why_killed is None:
                self.kill(f"it sent what no host sends ({type(error).__name__})")

    @property
    def beats(self) -> bool:
        """Whether its event loop is alive."""
        return self.is_ready and time.monotonic() - self._last_beat_s < ALIVE_S

    def look(self) -> None:
        """Ends what is left of a process that has ended, and whose socket another one keeps."""
        child = self.child
        if child is not None and self._transport is not None and self._why_killed is None:
            if child.process.poll() is not None:
                self.kill(child.ending())

    # -- rollouts

    async def ready(self) -> None:
        """Returns when a process is. Raises ``EnvironmentFailed`` if it cannot be."""
        if not self.is_ready:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            self.ensure_started()
            await waiting

    def take(self, rollout: Rollout) -> None:
        self.rollouts[rollout.number] = rollout
        self.ensure_started()
        if self.is_ready:
            self._start(rollout)

    def cancel(self, rollout: Rollout) -> None:
        """Tells the host to end it; nothing more is heard of it here."""
        if self.rollouts.pop(rollout.number, None) is not None and rollout.sent_s is not None:
            self.overdue[rollout.number] = time.monotonic()
            self.send(orjson.dumps({"type": "cancel", "id": rollout.number}))
        if self.is_retiring and not self.rollouts and self.child is not None and self.alive:
            self.kill("its last rollout has ended")

    def _start(self, rollout: Rollout) -> None:
        rollout.sent_s = time.monotonic()
        self.send(rollout.message)

    # -- what it says

    def on_message(self, payload: bytes) -> None:
        message = orjson.loads(payload)
        try:
            self._heed(message)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoMessage from error

    def _heed(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "beat":
            self._last_beat_s = time.monotonic()
            self.num_hung_threads = int(message["hung_threads"])
        elif kind == "output":
            dropped = f" ({message['dropped']} bytes more)" if message["dropped"] else ""
            text = message["text"].rstrip("\n")
            # a level that is shown: whoever prints looks for it
            logger.warning("environment %s prints%s: %s", self.settings.name, dropped, text)
        elif kind == "ready":
            self.is_ready = self._was_ready = True
            self._last_beat_s = time.monotonic()
            most = message["max_rollouts"]
            self.max_rollouts = None if most is None else int(most)
            for waiting in self._taken_waiting():
                waiting.set_result(None)
            for rollout in list(self.rollouts.values()):
                self._start(rollout)
        elif message["id"] is None:
            self._fail_all(lambda: self._failure(message))
        else:
            self._on_answer(message)

    def _on_answer(self, message: dict[str, Any]) -> None:
        number = message["id"]
        rollout = self.rollouts.get(number)
        if rollout is not None and not rollout.future.done():
            # before it is taken out: if this is no message, the rollout ends with its host
            if message["type"] == "done":
                turns = _turn_rewards(message["turn_rewards"])
                parts = {str(name): float(part) for name, part in message["components"].items()}
                calls = tuple(ToolCallTime(*call) for call in message["tool_calls"])
                rollout.future.set_result(Outcome(float(message["reward"]), parts, turns, calls))
            elif message["type"] == "failed":
                rollout.future.set_exception(self._failure(message))
        self.overdue.pop(number, None)
        if self.rollouts.pop(number, None) is None:
            return  # it was over here: cancelled, or given up
        if self.is_retiring and not self.rollouts and self._why_killed is None:
            self.kill("its last rollout has ended")

    def _failure(self, message: dict[str, Any]) -> EnvironmentFailed:
        if message["out_of_turns"]:
            return OutOfTurns(self.settings.name, message["error"], message["where"])
        kind = EnvironmentUnreachable if message["unreachable"] else EnvironmentFailed
        error = kind(self.settings.name, message["error"], message["where"])
        if (said := (message["error"], str(message["where"]))) not in self._logged:
            self._logged.add(said)  # once: a group of samples fails alike
            logger.error("%s\n%s", error, message["traceback"].rstrip())
        return error

    def kill(self, why: str) -> None:
        self.is_ready = False  # what comes now waits for the next process
        super().kill(why)

    def on_end(self, how: str) -> None:
        """The rollouts in it fail; those that came behind get another process, unless this one
        never was ready."""
        name, was_ready = self.settings.name, self._was_ready
        self.is_ready = self._was_ready = False
        self.num_hung_threads = 0
        self.overdue.clear()
        if self.rollouts or self._waiting:
            logger.error("environment %s: its host process ended: %s", name, how)
        behind = {n: each for n, each in self.rollouts.items() if was_ready and not each.sent_s}
        self.rollouts = {n: each for n, each in self.rollouts.items() if n not in behind}
        self._fail_all(lambda: HostDied(name, f"its host process ended: {how}"))
        self.rollouts = behind
        if behind:
            self.ensure_started()

    def _fail_all(self, error: Callable[[], EnvironmentFailed]) -> None:
        rollouts, self.rollouts = self.rollouts, {}
        for waiting in self._taken_waiting():
            waiting.set_exception(error())
        for rollout in rollouts.values():
            if not rollout.future.done():
                rollout.future.set_exception(error())

    def _taken_waiting(self) -> list[asyncio.Future[None]]:
        waiting, self._waiting = self._waiting, []
        return [future for future in waiting if not future.done()]


def _turn_rewards(told: Any) -> tuple[float, ...] | dict[str, float]:
    if isinstance(told, dict):
        return {str(turn): float(reward) for turn, reward in told.items()}
    return tuple(map(float, told))
