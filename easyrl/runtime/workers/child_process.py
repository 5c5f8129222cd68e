"""Child interpreters that answer this process over a socket: what workers and fetchers share.

A child imports only what it is told to run. It leads a session of its own: Ctrl-C does not reach
it. What it started ends with it, also in a session of its own: all of it inherits a mark in the
environment. It ends by its parent alone: DeepSpeed's launcher sends SIGTERM to all below it, and
the parent may need its children to end well. Messages are frames (``runtime.frames``).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1  # linux/prctl.h
HEARTBEAT_S = 1.0  # of a ``ReportingChild``: a message, maybe of nothing, at least so often
END_LIMIT_S = 5.0  # for killed processes to be gone
END_POLL_S = 0.02
MARK_PREFIX = "EASYRL_CHILD_"  # of the names of variables by which processes of a run are found
# Set before the child's first import: several processes are the parallelism.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from easyrl.runtime.workers.child_process import child_main; "
    "child_main({entry!r}, {descriptor}, {parent})"
)


@dataclass(frozen=True, slots=True)
class Child:
    """A running interpreter and this process's end of the socket to it."""

    process: subprocess.Popen
    socket: socket.socket
    mark: str  # name of a variable in its environment, and in that of all that it starts

    def kill(self) -> None:
        """Tells it to end, with its process group, and returns at once. The socket stays open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, limit_s: float = END_LIMIT_S) -> list[int]:
        """Kills it and all that it started; returns when they are gone. Blocks.

        One that the kernel does not let go (a disk that hangs) is left behind after ``limit_s``:
        the result lists them.
        """
        from easyrl.runtime.process_guard import marked_processes  # of no use to the child

        deadline_s = time.monotonic() + limit_s
        while True:
            self.kill()
            has_ended = self.process.poll() is not None
            left = marked_processes(self.mark)
            if has_ended and not left:
                return []
            if time.monotonic() > deadline_s:
                return left if has_ended else sorted({self.process.pid, *left})
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(END_POLL_S)

    def ending(self) -> str:
        """How it ended, in words; for one that closed its socket. Blocks for a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # the socket closes a moment before there is an exit code
        code = self.process.returncode
        if code is None or code >= 0:
            return "its socket was closed" if code is None else f"exit code {code}"
        out_of_memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        return signal.Signals(-code).name + out_of_memory


def start_child(entry: str, environment: Mapping[str, str] | None = None) -> Child:
    """Starts an interpreter that runs ``entry`` (``module:function``) with its socket as argument.

    On Linux the kernel kills the child when the *thread* that called this ends: call it from one
    that lives as long as the child is needed.
    """

    def command(descriptor: int) -> list[str]:
        path = [str(folder) for folder in sys.path]
        parent = os.getpid()
        code = CODE.format(path=path, entry=entry, descriptor=descriptor, parent=parent)
        return [sys.executable, "-c", code]

    return start_command(command, environment)


def start_command(
    command: Callable[[int], Sequence[str]], environment: Mapping[str, str] | None = None
) -> Child:
    """Starts what ``command`` says of the file descriptor of the child's socket.

    ``environment`` is added to this process's own.
    """
    ours, theirs = socket.socketpair()
    with theirs:  # the child's is the only one afterwards, so that its death reads as end of file
        mark = new_mark()
        process = subprocess.Popen(
            command(theirs.fileno()),
            env={**os.environ, **ENVIRONMENT, **(environment or {}), mark: ""},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return Child(process, ours, mark)


def new_mark() -> str:
    """Name of a variable that no other process has."""
    return f"{MARK_PREFIX}{secrets.token_hex(8)}"


def child_main(entry: str, descriptor: int, parent_pid: int) -> None:
    """What a child runs."""
    _die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # unlike SIG_IGN, not for what it starts
    module, function = entry.split(":")
    vars(importlib.import_module(module))[function](socket.socket(fileno=descriptor))


def _die_with_parent(parent_pid: int) -> None:
    """Elsewhere than on Linux an orphan ends when it next reads or writes its socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


# -- exceptions, with their traceback --------------------------------------------------------


class RemoteTraceback(Exception):
    """The child's traceback, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that can be pickled whatever its class."""

    pickled: bytes | None  # apart, since not every exception survives it
    description: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an exception that is being handled."""
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
        return cls(pickled, f"{type(error).__name__}: {error}", traceback.format_exc())

    def exception(self) -> Exception:
        """The exception, or a ``RuntimeError`` that describes it."""
        error: BaseException | None = None
        if self.pickled is not None:
            # The class may exist in the child only (a user's reward file), or refuse its own args.
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
        # A SystemExit of a child must not end this process; a StopIteration cannot be awaited.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            error = RuntimeError(self.description)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error
