"""Runs many rollouts of one environment at once: a process that reads and writes JSON lines.

    python host.py [DESCRIPTOR PARENT_PID]

It is started by its path, also by another Python than the trainer's, and imports only the standard
library; the environment's kind (``kinds``) imports what that needs. Lines come and go over the
socket ``DESCRIPTOR``, or over standard input and output. In, the first line: ``{"type":
"environment", "kind", "settings", "path"}``, where ``path`` is ``sys.path``, or null for this
Python's own; once that is answered by ``ready``: ``{"type": "start", "id", "base_url", "api_key",
"model", "prompt", "seed"}`` and ``{"type": "cancel", "id"}``. Out: ``{"type": "ready",
"max_rollouts"}``, or ``failed`` without an id; for each start one of ``{"type": "done", "id",
"reward", "components", "turn_rewards"}``, ``{"type": "failed", "id", "error", "where", "traceback",
"unreachable", "out_of_turns"}`` and ``{"type": "cancelled", "id"}``, each with ``"tool_calls"``,
the first ``MOST_TOOL_CALLS``: name, start and end in seconds of ``time.monotonic``, which the
machine's processes share, and whether it was an error; ``{"type": "beat", "hung_threads"}`` each
second that the event loop is alive; ``{"type": "output", "text", "dropped"}``, what the environment
has printed, at most ``OUTPUT_CHARACTERS`` each second.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import faulthandler
import gc
import importlib.util
import json
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
BEAT_S = 1.0
OUTPUT_CHARACTERS = 4096
ERROR_CHARACTERS = 1000
TRACEBACK_CHARACTERS = 16_000
MOST_COMPONENTS = 256
MOST_TURN_REWARDS = 100_000
MOST_TOOL_CALLS = 10_000
NAME_CHARACTERS = 200
OUT_OF_TURNS = "max_turns_exceeded"  # the gateway's code where max_turns refuses a turn
LARGEST = 3.4028234663852886e38  # that a float32 holds, in which rewards are trained
UNREACHABLE = {  # of connections, beside what is a ``ConnectionError``
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Session:
    """Where a rollout asks its model, and nobody else does."""

    base_url: str  # ends in /v1
    api_key: str
    model: str
    tool_calls: list[tuple[str, float, float, bool]] = field(default_factory=list)

    def add_tool_call(self, name: str, start_s: float, end_s: float, is_error: bool) -> None:
        """Notes for the run's timeline what a tool took; seconds of ``time.monotonic``."""
        if len(self.tool_calls) < MOST_TOOL_CALLS:
            self.tool_calls.append((name[:NAME_CHARACTERS], start_s, end_s, is_error))


@dataclass(frozen=True)
class Prompt:
    """What a rollout begins with: a record of the data."""

    text: str  # the user's question, before any template
    messages: list[dict[str, Any]]  # the same as a chat, with the system's message
    answer: str | None
    metadata: dict[str, Any]  # the record's other fields
    index: int  # its place in the data
    epoch: int
    is_held_out: bool  # of a set that is evaluated and not trained
    seed: int  # of this rollout alone, the same when it is run again
    model: str  # name to ask the client for


class NoResult(ValueError):
    """What a rollout returned is nothing to train on."""


def result_of(value: Any) -> dict[str, Any]:
    """``reward``, ``components`` and ``turn_rewards`` of what a rollout returned.

    A number is the reward; a mapping, or an object with such attributes, has ``reward`` and may
    have the others. ``turn_rewards`` are numbers in the order in which turns were answered, or by
    the turns' ids. Raises ``NoResult``.
    """
    if _is_number(value):
        return {"reward": _number(value, "reward"), "components": {}, "turn_rewards": []}
    if isinstance(value, dict):
        said = value
    elif hasattr(value, "reward"):
        said = {name: getattr(value, name, None) for name in ("reward", *_OPTIONAL)}
    else:
        said = {}
    if "reward" not in said:
        raise NoResult(
            f"the rollout returned {value!r:.200}; return a number, or a mapping with a 'reward' "
            "and, if you like, 'components' and 'turn_rewards'"
        )
    if unknown := sorted(map(str, said.keys() - {"reward", *_OPTIONAL})):
        raise NoResult(f"the rollout returned {unknown[0]!r}; use components for metrics")
    components, turn_rewards = said.get("components") or {}, said.get("turn_rewards") or ()
    if not hasattr(components, "items") or len(components) > MOST_COMPONENTS:
        raise NoResult(f"components has to be a mapping of at most {MOST_COMPONENTS} numbers")
    if len(turn_rewards) > MOST_TURN_REWARDS:
        raise NoResult(f"{len(turn_rewards)} turn_rewards; at most {MOST_TURN_REWARDS} are taken")
    return {
        "reward": _number(said["reward"], "reward"),
        "components": {
            str(name)[:NAME_CHARACTERS]: _number(part, f"components[{str(name)[:50]!r}]")
            for name, part in components.items()
        },
        "turn_rewards": _turn_rewards(turn_rewards),
    }


def _turn_rewards(given: Any) -> list[float] | dict[str, float]:
    if not hasattr(given, "items"):
        return [_number(part, "turn_rewards") for part in given]
    return {
        str(turn)[:NAME_CHARACTERS]: _number(part, f"turn_rewards[{str(turn)[:50]!r}]")
        for turn, part in given.items()
    }


_OPTIONAL = ("components", "turn_rewards")


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (str, bytes, dict))


def _number(value: Any, what: str) -> float:
    number = float(value) if _is_number(value) else math.nan
    if not abs(number) <= LARGEST:  # a NaN is neither above nor below
        raise NoResult(f"{what} is {value!r:.100}; it has to be a finite number (float32)")
    return number


# -- what went wrong ---------------------------------------------------------------------------


def failure_of(error: BaseException, own_file: str | None) -> dict[str, Any]:
    """``error``, on one line, ``where`` in the user's code it came from, and its ``traceback``.

    ``unreachable``: a connection that could not be had, or was lost, is its cause.
    ``out_of_turns``: it is the gateway's refusal of a turn beyond ``max_turns``, or was raised from
    it.
    """
    leaf = error
    while parts := getattr(leaf, "exceptions", None):  # a group's first says more than the group
        leaf = parts[0]
    try:
        said = " ".join(f"{type(leaf).__name__}: {leaf}".split()).removesuffix(":")
        if isinstance(leaf, NoResult):
            said = " ".join(str(leaf).split())
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        where = _where(leaf, own_file)
        unreachable, out_of_turns = _is_unreachable(error), _is_out_of_turns(error)
    except Exception as of_text:  # a user's may not tell what it is, or where
        said = lines = f"{type(leaf).__name__} (its text raises {type(of_text).__name__})"
        where, unreachable, out_of_turns = own_file, False, False
    return {
        "error": said[:ERROR_CHARACTERS],
        "where": where,
        "traceback": lines[-TRACEBACK_CHARACTERS:],
        "unreachable": unreachable,
        "out_of_turns": out_of_turns,
    }


def _is_unreachable(error: BaseException) -> bool:
    """Libraries wrap what the system says of a connection in errors of their own."""
    return any(
        isinstance(each, (ConnectionError, socket.gaierror))
        or (isinstance(each, OSError) and each.errno in UNREACHABLE)
        for each in _causes(error, handled=True)
    )


def _is_out_of_turns(error: BaseException) -> bool:
    """By its code. What a handler of the refusal raises by itself is a fault of its own."""
    return any(
        getattr(each, "code", None) == OUT_OF_TURNS for each in _causes(error, handled=False)
    )


def _causes(error: BaseException, *, handled: bool) -> Iterator[BaseException]:
    """``error``, those of a group, and those that they were raised from.

    ``handled``: those too in whose handling they were raised.
    """
    seen: list[BaseException] = []
    left: list[Any] = [error]
    while left:
        each = left.pop()
        if not isinstance(each, BaseException) or any(each is other for other in seen):
            continue
        yield each
        seen.append(each)
        left += [each.__cause__, *getattr(each, "exceptions", ())]
        if handled:
            left.append(each.__context__)


def _where(error: BaseException, own_file: str | None) -> str | None:
    """The innermost line of the user's file; without one the innermost that is not ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if own_file and Path(frame.filename).resolve() == Path(own_file)
    ]
    others = [frame for frame in frames if FOLDER not in Path(frame.filename).resolve().parents]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}"
    if others and others[-1] is frames[-1]:
        return f"{others[-1].filename}:{others[-1].lineno}"
    return own_file


# -- the lines ---------------------------------------------------------------------------------


class Lines:
    """JSON lines over descriptors; may be written by several threads."""

    def __init__(self, read: int, write: int) -> None:
        self.read_descriptor, self._write = read, write
        self._left = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        # half of a surrogate pair, which a str may have, is no text that JSON can carry
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._write, data) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that are complete, after one read, which may wait; None at the end."""
        data = os.read(self.read_descriptor, 2**18)
        if not data:
            return None
        *lines, self._left = (self._left + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class Output:
    """Reads what this process prints, and says the beginning of each second's.

    A thread reads it, so that what floods is dropped here and whoever prints never waits long.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        # new ones: those that were opened on a file cannot write to a pipe
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        self._lock = threading.Lock()
        self._kept, self._dropped = b"", 0
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        while data := os.read(descriptor, 2**16):
            with self._lock:
                room = OUTPUT_CHARACTERS - len(self._kept)
                self._kept += data[:room]
                self._dropped += len(data[room:])

    def taken(self) -> tuple[str, int]:
        """Text since the last call, and bytes more that were dropped."""
        with self._lock:
            kept, dropped, self._kept, self._dropped = self._kept, self._dropped, b"", 0
        return kept.decode(errors="replace"), dropped


# -- the host ----------------------------------------------------------------------------------


class Host:
    """The environment of this process and its rollouts."""

    def __init__(self, lines: Lines, output: Output, environment: Any, own_file: str | None):
        self._lines, self._output = lines, output
        self._environment, self._own_file = environment, own_file
        self._tasks: dict[Any, asyncio.Task[None]] = {}
        self._cancelled: set[Any] = set()
        self._threads = _by_file("host_threads", "host_threads.py").HostThreads()

    async def serve(self) -> None:
        """Ends when nobody sends lines any more."""
        asyncio.get_running_loop().set_default_executor(self._threads)
        try:
            await self._environment.start()
        except BaseException as error:
            self._lines.send(type="failed", id=None, **failure_of(error, self._own_file))
            return
        self._lines.send(
            type="ready",
            pid=os.getpid(),
            python=sys.version.split()[0],
            max_rollouts=self._environment.max_rollouts,
        )
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._lines.read_descriptor, self._read, ended)
        beating = loop.create_task(self._beat())
        await ended.wait()
        beating.cancel()

    def _read(self, ended: asyncio.Event) -> None:
        messages = self._lines.receive()
        if messages is None:
            asyncio.get_running_loop().remove_reader(self._lines.read_descriptor)
            ended.set()
        for message in messages or ():
            number = message["id"]
            if message["type"] == "start":
                self._tasks[number] = asyncio.create_task(self._rollout(number, message))
            elif message["type"] == "cancel" and number in self._tasks:
                self._cancelled.add(number)
                self._tasks[number].cancel()

    async def _rollout(self, number: Any, message: dict[str, Any]) -> None:
        session = Session(message["base_url"], message["api_key"], message["model"])
        try:
            prompt = Prompt(**message["prompt"], seed=message["seed"], model=session.model)
            result = result_of(await self._environment.rollout(session, prompt))
            answer = {"type": "done", "id": number, **result}
        except BaseException as error:  # users' code may raise anything; SystemExit ends no host
            if isinstance(error, asyncio.CancelledError) and number in self._cancelled:
                answer = {"type": "cancelled", "id": number}
            else:
                failure = failure_of(error, self._own_file)
                answer = {"type": "failed", "id": number, **failure}
        self._tasks.pop(number, None)
        self._cancelled.discard(number)
        self._say_output()  # what it has printed comes before what came of it
        self._lines.send(**answer, tool_calls=session.tool_calls)

    async def _beat(self) -> None:
        while True:
            hung = self._threads.num_hung + self._environment.num_hung_threads
            self._lines.send(type="beat", rollouts=len(self._tasks), hung_threads=hung)
            self._say_output()
            await asyncio.sleep(BEAT_S)

    def _say_output(self) -> None:
        text, dropped = self._output.taken()
        if text:
            self._lines.send(type="output", text=text, dropped=dropped)


def load_kind(kind: str, settings: dict[str, Any]) -> Any:
    """The environment of ``kind``."""
    return _by_file(f"kind_{kind}", f"kinds/{kind}.py").load(settings)


def _by_file(name: str, file: str) -> Any:
    """A module of this folder: by its file, since this package may not be importable here."""
    name = f"easyrl_environment_{name}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> None:
    """What the process runs."""
    if arguments:
        descriptor, parent = map(int, arguments)
        _die_with(parent)
        _ends_by_its_parent_alone()
        lines = Lines(descriptor, descriptor)
    else:
        lines = Lines(os.dup(0), os.dup(1))
    faulthandler.enable(os.dup(2))
    # this folder's files must not be taken for the user's modules
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != FOLDER]
    output = Output()
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = lines.receive()
    if messages is None:
        return
    greeting = messages[0]
    own_file = greeting["settings"].get("file")
    own_file = str(Path(own_file).resolve()) if own_file else None
    if greeting["path"] is not None:
        sys.path[:] = greeting["path"]
    try:
        environment = load_kind(greeting["kind"], greeting["settings"])
    except BaseException as error:
        lines.send(type="failed", id=None, **failure_of(error, own_file))
        return
    gc.collect()
    gc.freeze()  # what is loaded stays: walking it again and again would hold rollouts up
    if arguments:
        _ends_by_its_parent_alone()  # libraries set handlers of their own when they are loaded
    asyncio.run(Host(lines, output, environment, own_file).serve())


def _ends_by_its_parent_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN, not for what it starts


def _die_with(parent: int) -> None:
    """Elsewhere than on Linux it ends when its socket does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    _trainers_stderr = os.dup(2)  # what is printed goes elsewhere from now on
    _exit_code = 0
    try:
        main(sys.argv[1:])
    except BrokenPipeError:
        pass
    except BaseException:
        _exit_code = 1
        os.write(_trainers_stderr, traceback.format_exc().encode(errors="replace"))
    os._exit(_exit_code)  # a thread of the user's must not hold it up
