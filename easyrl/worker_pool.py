"""Processes that can be killed when a task hangs: decoding and scoring run here.

One thread of this process looks after each worker: it sends a task, waits with a deadline, and
starts a new process when the old one hung or died. Nothing is shared between workers, so that a
killed one cannot hold a lock that another needs, and a death is known at once and belongs to
exactly one task.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Set before the worker's first import: a pool of workers is the parallelism.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
WORKER_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from easyrl.worker_pool import worker_main; worker_main({descriptor}, {parent})"
)


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

    Workers are new interpreters that import only what their tasks need (not the main script, unless
    a task lives in it; then the script needs its ``if __name__ == "__main__":``). Each leads a
    session: Ctrl-C does not reach it, and what it started is killed with it. ``close`` leaves no
    process behind; on Linux neither does a parent that is killed.

    Args:
        num_workers: processes; each runs one task at a time.
        initializer: called with ``initargs`` in each new process before its first task. If it
            raises, the tasks raise its exception.
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
        self._workers = [_Worker(start) for _ in range(num_workers)]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(w,), name="easyrl-worker-keeper", daemon=True
            )
            for w in self._workers
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    async def call(
        self, function: Callable[..., T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """``function(*args)`` in a worker; tasks start in the order of the calls.

        ``function``, ``args`` and the result are pickled. ``timeout_s`` counts from when a worker
        takes the task, not from the call. Raises ``WorkerTimeout``, ``WorkerDied``, or what the
        function raised, with the remote traceback as its cause. Cancelling drops a task that waits;
        one that runs is finished or timed out, and its result is dropped.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        future: Future[T] = Future()
        self._tasks.put(
            _Task(_name(function), pickle.dumps((function, args), 5), timeout_s, future)
        )
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
        while True:
            with contextlib.suppress(
                Exception
            ):  # early, to hide the start-up; the next task meets it again
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
        if not isinstance(error, Exception):  # a SystemExit of a task must not end this process
            error = RuntimeError(self.description)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


class _Worker:
    """One process and the pipe to it, used by one thread, killed by any."""

    def __init__(self, start: bytes) -> None:
        self._start = start
        self._lock = threading.Lock()  # between starting and retiring
        self._retired = False
        self._process: subprocess.Popen | None = None
        self._pipe: Connection

    def ensure_running(self) -> None:
        """Starts the process if there is none, and waits until its initializer is through."""
        if self._process is not None and self._process.poll() is None:
            return
        with self._lock:
            if self._retired:
                raise WorkerDied("the worker pool was closed")
            self._pipe, remote = Pipe()
            code = WORKER_CODE.format(
                path=[str(folder) for folder in sys.path],
                descriptor=remote.fileno(),
                parent=os.getpid(),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | WORKER_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
        remote.close()  # the worker's is the only one now, so that its death reads as end of file
        try:
            self._ask("the start of a worker", pickle.dumps(_main_script()), None)
            self._ask("the initializer of the workers", self._start, None)
        except BaseException:
            self._kill()  # half-started: the next task has to meet the same failure
            raise

    def run(self, task: _Task) -> Any:
        """The result of ``task``. Raises as ``WorkerPool.call`` does."""
        return self._ask(task.name, task.payload, task.timeout_s)

    def retire(self) -> None:
        """Kills the process for good."""
        with self._lock:
            self._retired = True
            self._kill()

    def _ask(self, name: str, payload: bytes, timeout_s: float | None) -> Any:
        try:
            self._pipe.send_bytes(payload)
            if not self._pipe.poll(timeout_s):
                self._kill()
                raise WorkerTimeout(
                    f"{name} took longer than {timeout_s:g} s; its worker process was killed"
                )
            reply = self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            raise self._death(name) from None
        value = pickle.loads(reply)
        if isinstance(value, _Failure):
            raise value.exception()
        return value

    def _kill(self) -> None:
        """With all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _death(self, name: str) -> WorkerDied:
        if self._retired:
            return WorkerDied(f"the worker pool was closed while {name} ran")
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # the pipe closes a moment before the exit code is there
        code = self._process.returncode
        self._kill()  # what it had started is still there
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return WorkerDied(f"the worker process running {name} ended unexpectedly: {how}")


def worker_main(descriptor: int, parent_pid: int) -> None:
    """What a worker process runs: answers tasks on its pipe until the other end goes away."""
    _die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    # The parent went away: there is nobody to tell.
    with contextlib.suppress(EOFError, ConnectionError):
        main_script: Mapping[str, str] = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(pickle.dumps(None))
        while True:
            pipe.send_bytes(_outcome(pipe.recv_bytes(), main_script))


def _die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, in whatever way.

    That thread lives until the pool is closed, so it is the parent's death that is meant. Elsewhere
    than on Linux an orphan ends when it next reads or writes its pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def _outcome(task: bytes, main_script: Mapping[str, str]) -> bytes:
    """Runs a pickled ``(function, args)``; the pickled result, or a ``_Failure``."""
    try:
        try:
            function, args = pickle.loads(task)
        except AttributeError:  # of the module __main__, which is not the user's script yet
            spawn.prepare(dict(main_script))
            function, args = pickle.loads(task)
        return pickle.dumps(function(*args), 5)
    except BaseException as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = None
        description = f"{type(error).__name__}: {error}"
        return pickle.dumps(_Failure(pickled, description, traceback.format_exc()), 5)


def _main_script() -> dict[str, str]:
    """Where this process's ``__main__`` comes from, as ``multiprocessing`` describes it."""
    data = spawn.get_preparation_data("easyrl-worker")
    return {key: value for key, value in data.items() if key.startswith("init_main_from")}


def _nothing() -> None:
    """The initializer where none is given."""


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return repr(function)
