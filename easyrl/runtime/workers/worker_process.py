"""The worker's side of ``worker_pool``: runs pickled functions, one at a time, and answers."""

from __future__ import annotations

import contextlib
import pickle
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import spawn

from easyrl.runtime.workers.child_process import FrameSplitter, frame

ENTRY = f"{__name__}:worker_main"
RECEIVE_BYTES = 2**16  # more would be mapped and unmapped by each call, which costs 15 µs


class RemoteTraceback(Exception):
    """The worker's traceback, as the cause of the exception that the task raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way home."""

    pickled: bytes | None  # apart, since not every exception survives it
    description: str
    traceback: str

    def exception(self) -> BaseException:
        error: BaseException | None = None
        if self.pickled is not None:
            # The class may exist in the worker only (a user's reward file), or refuse its own args.
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
        # A SystemExit of a task must not end this process; a StopIteration cannot be awaited.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            error = RuntimeError(self.description)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


def main_script() -> dict[str, str]:
    """Where this process's ``__main__`` comes from, as ``multiprocessing`` describes it."""
    data = spawn.get_preparation_data("easyrl-worker")
    return {key: value for key, value in data.items() if key.startswith("init_main_from")}


def worker_main(connection: socket.socket) -> None:
    """What a worker process runs: answers its tasks until the other end goes away.

    The first frame is the parent's ``main_script``, which is not answered; each further one a
    pickled ``(function, args)``, answered by the pickled result or a ``Failure``.
    """
    script: Mapping[str, str] | None = None
    frames = FrameSplitter()
    # A ConnectionError: the parent went away, there is nobody to tell.
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(RECEIVE_BYTES):
            for payload in frames.feed(data):
                if script is None:
                    script = pickle.loads(payload)
                else:
                    connection.sendall(frame(_outcome(payload, script)))


def _outcome(task: bytes, script: Mapping[str, str]) -> bytes:
    """Runs a pickled ``(function, args)``; the pickled result, or a ``Failure``."""
    try:
        try:
            function, args = pickle.loads(task)
        except AttributeError:  # of the module __main__, which is not the user's script yet
            spawn.prepare(dict(script))
            function, args = pickle.loads(task)
        return pickle.dumps(function(*args), 5)
    except BaseException as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        description = f"{type(error).__name__}: {error}"
        return pickle.dumps(Failure(pickled, description, traceback.format_exc()), 5)
