"""The worker's side of ``worker_pool``: runs pickled functions, one at a time, and answers."""

from __future__ import annotations

import contextlib
import pickle
import socket
from collections.abc import Iterator, Mapping
from multiprocessing import spawn

from easyrl.runtime.frames import FrameSplitter, frame
from easyrl.runtime.workers.child_process import Failure

ENTRY = f"{__name__}:worker_main"
RECEIVE_BYTES = 2**16  # more would be mapped and unmapped by each call, which costs 15 µs


def main_script() -> dict[str, str]:
    """Where this process's ``__main__`` comes from, as ``multiprocessing`` describes it."""
    data = spawn.get_preparation_data("easyrl-worker")
    return {key: value for key, value in data.items() if key.startswith("init_main_from")}


def worker_main(connection: socket.socket) -> None:
    """What a worker process runs: answers its tasks until the other end goes away.

    The first message is a pickled ``(main_script, initializer)``, answered by an empty one when the
    initializer has run; each further one is a task, answered by the pickled result or ``Failure``,
    the initializer's if that failed. Both are a pickled ``(function, args)``.
    """
    messages = _received(connection)
    # A ConnectionError: the parent went away, there is nobody to tell.
    with contextlib.suppress(ConnectionError, StopIteration):
        script, initializer = pickle.loads(next(messages))
        failure: bytes | None = None
        try:
            _run(initializer, script)
        except BaseException as error:
            failure = pickle.dumps(Failure.of(error), 5)
        connection.sendall(frame(b""))
        for task in messages:
            connection.sendall(frame(failure or _outcome(task, script)))


def _received(connection: socket.socket) -> Iterator[bytes]:
    frames = FrameSplitter()
    while data := connection.recv(RECEIVE_BYTES):
        yield from frames.feed(data)


def _outcome(task: bytes, script: Mapping[str, str]) -> bytes:
    try:
        return pickle.dumps(_run(task, script), 5)
    except BaseException as error:
        return pickle.dumps(Failure.of(error), 5)


def _run(task: bytes, script: Mapping[str, str]) -> object:
    try:
        function, args = pickle.loads(task)
    except AttributeError:  # of the module __main__, which is not the user's script yet
        spawn.prepare(dict(script))
        function, args = pickle.loads(task)
    return function(*args)
