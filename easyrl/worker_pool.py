"""Processes that can be killed when a task hangs: decoding and scoring run here, beside the trainer.

One thread of this process looks after each worker: it sends a task, waits with a deadline, and starts a new
process when the old one hung or died. Nothing is shared between workers, so that a killed one cannot hold a
lock that another needs, and a death is known at once and belongs to exactly one task.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerTimeout(TimeoutError):
    """A task ran for longer than it was allowed; its process was killed and replaced."""


class WorkerDied(RuntimeError):
    """The process ended while it ran a task (segmentation fault, ``os._exit``, out of memory)."""


class RemoteTraceback(Exception):
    """The worker's traceback, as the cause of the exception that the task raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerPool:
    """``num_workers`` processes that run functions for any asyncio loop.

    Workers are spawned, not forked, and each is the leader of a session: Ctrl-C does not reach it, and what
    it started itself is killed with it. ``close`` leaves no process behind; on Linux neither does a parent
    that is killed. As with every spawned process, a script that makes a pool needs
    ``if __name__ == "__main__":``.

    Args:
        num_workers: processes; each runs one task at a time.
        initializer: called with ``initargs`` in each new process before its first task. If it raises, the
            tasks raise its exception.
    """

    def __init__(
        self,
        num_workers: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers: {num_workers}, needs at least 1")
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        start = pickle.dumps((initializer or _nothing, initargs))
        resource_tracker.ensure_running()  # it unblocks SIGINT in the thread that starts it: see _serve
        self._workers = [_Worker(start) for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(w,), name="easyrl-worker-keeper", daemon=True)
            for w in self._workers
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    async def call(
        self, function: Callable[..., T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """``function(*args)`` in a worker; tasks start in the order of the calls.

        ``function``, ``args`` and the result are pickled. ``timeout_s`` counts from when a worker takes the
        task, not from the call. Raises ``WorkerTimeout``, ``WorkerDied``, or what the function raised, with
        the remote traceback as its cause. Cancelling drops a task that waits; one that runs is finished or
        timed out, and its result is dropped.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        future: Future[T] = Future()
        self._tasks.put(_Task(_name(function), pickle.dumps((function, args), 5), timeout_s, future))
        if self._closed:  # closed by another thread in between: nobody may take the task any more
            future.cancel()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Kills the workers, cancels what waits, joins the threads. Safe to call twice."""
        atexit.unregister(self.close)
        self._closed = True
        for worker in self._workers:
            worker.retire()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: _Worker) -> None:
        # Inherited by the worker: Ctrl-C while it starts up must not end it with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            with contextlib.suppress(Exception):  # early, to hide the start-up; the next task meets it again
                worker.ensure_running()
            task = self._tasks.get()
            if task is None:
                return
            if self._closed:
                task.future.cancel()
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                worker.ensure_running()  # it may have died while idle, which is no task's fault
                result = worker.run(task)
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
            del task


@dataclass(slots=True)
class _Task:
    name: str  # of the function, for messages
    payload: bytes  # pickled (function, args)
    timeout_s: float | None
    future: Future


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way home; ``pickled`` is apart because not every exception survives it."""

    pickled: bytes | None
    description: str
    traceback: str

    def exception(self) -> BaseException:
        error: BaseException | None = None
        if self.pickled is not None:
            # The class may exist in the worker only (a user's reward file) or refuse its own arguments.
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
        if not isinstance(error, Exception):  # a SystemExit of a task must not end this process
            error = RuntimeError(self.description)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


class _Worker:
    """One process and the pipe to it, used by one thread, killed by any."""

    def __init__(self, start: bytes) -> None:
        self._start = start
        self._context: SpawnContext = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()  # between starting and retiring
        self._retired = False
        self._process: Any = None
        self._pipe: Connection

    def ensure_running(self) -> None:
        """Starts the process if there is none, and waits until its initializer is through."""
        if self._process is not None and self._process.is_alive():
            return
        with self._lock:
            if self._retired:
                raise WorkerDied("the worker pool was closed")
            self._pipe, remote = self._context.Pipe()
            self._process = self._context.Process(
                target=_worker_main,
                args=(remote, os.getpid(), self._start),
                name="easyrl-worker",
                daemon=True,
            )
            self._process.start()
        remote.close()  # so that the worker's end of it is the only one, and its death reads as end of file
        try:
            self._receive("the initializer")
        except BaseException:
            self._kill()
            raise

    def run(self, task: _Task) -> Any:
        """The result of ``task``. Raises as ``WorkerPool.call`` does."""
        try:
            self._pipe.send_bytes(task.payload)
        except OSError:
            raise self._death(task.name) from None
        if not self._pipe.poll(task.timeout_s):
            self._kill()
            raise WorkerTimeout(
                f"{task.name} took longer than {task.timeout_s:g} s; its worker process was killed"
            )
        return self._receive(task.name)

    def retire(self) -> None:
        """Kills the process for good."""
        with self._lock:
            self._retired = True
            if self._process is not None:
                self._kill()

    def _receive(self, name: str) -> Any:
        try:
            reply = self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._death(name) from None
        value = pickle.loads(reply)
        if isinstance(value, _Failure):
            raise value.exception()
        return value

    def _kill(self) -> None:
        process = self._process
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # gone, or not yet the leader of its group
            process.kill()
        process.join()

    def _death(self, name: str) -> WorkerDied:
        if self._retired:
            return WorkerDied(f"the worker pool was closed while {name} ran")
        self._process.join(timeout=5)  # the pipe closes a moment before the exit code is there
        code = self._process.exitcode
        self._kill()  # and what it had started
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return WorkerDied(f"the worker process running {name} ended unexpectedly: {how}")


def _worker_main(pipe: Connection, parent_pid: int, start: bytes) -> None:
    _die_with_parent(parent_pid)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of workers is the parallelism
    task = start
    # The parent went away: there is nobody to tell.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(_outcome(task))
            task = pipe.recv_bytes()


def _die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, in whatever way.

    That thread lives until the pool is closed, so it is the parent's death that is meant. Elsewhere than on
    Linux an orphan ends when it next reads or writes its pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def _outcome(task: bytes) -> bytes:
    """Runs a pickled ``(function, args)``; the pickled result, or a ``_Failure``."""
    try:
        function, args = pickle.loads(task)
        return pickle.dumps(function(*args), 5)
    except BaseException as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        description = f"{type(error).__name__}: {error}"
        return pickle.dumps(_Failure(pickled, description, traceback.format_exc()), 5)


def _nothing() -> None:
    """The initializer where none is given."""


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return repr(function)
