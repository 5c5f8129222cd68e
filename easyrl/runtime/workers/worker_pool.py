"""Processes that can be killed when a task hangs: rewards run here.

The loop that calls talks with the worker itself: no other thread of this process wakes up for a
task. Nothing is shared between workers, so that a killed one cannot hold a lock that another needs,
and a death is known at once and belongs to exactly one task.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from easyrl.runtime.workers.child_process import Child, FrameSplitter, frame, start_child
from easyrl.runtime.workers.worker_process import (
    ENTRY,
    RECEIVE_BYTES,
    Failure,
    RemoteTraceback,
    main_script,
)

__all__ = ["RemoteTraceback", "WorkerDied", "WorkerPool", "WorkerTimeout"]

T = TypeVar("T")
START_SEND_TIMEOUT_S = 60.0


class WorkerTimeout(TimeoutError):
    """A task ran for longer than it was allowed; its process was killed and replaced."""


class WorkerDied(RuntimeError):
    """The process ended while it ran a task (segmentation fault, ``os._exit``, out of memory)."""


class WorkerPool:
    """``num_workers`` processes that run functions for any asyncio loop, of any thread.

    Workers are new interpreters that import only what their tasks need (not the main script, unless
    a task lives in it; then the script needs its ``if __name__ == "__main__":``). ``close`` leaves
    no process behind; on Linux neither does a parent that is killed.

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
        # A thread of its own starts processes: they end with the thread that started them.
        self._starter = ThreadPoolExecutor(1, "easyrl-worker-starter")
        greeting = frame(pickle.dumps(main_script()))
        greeting += frame(pickle.dumps((initializer or _nothing, initargs)))
        self._workers = [
            _Worker(greeting, self._starter, self._next_task) for _ in range(num_workers)
        ]
        self._lock = threading.Lock()  # of what follows
        self._closed = False
        self._idle = deque(self._workers)
        self._waiting: deque[_Task] = deque()
        self._watches: dict[asyncio.AbstractEventLoop, asyncio.Task] = {}  # each by its own loop
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
        payload = frame(pickle.dumps((function, args), 5))
        loop = asyncio.get_running_loop()
        if loop not in self._watches:
            self._watches[loop] = loop.create_task(self._watch(loop))
        task = _Task(_name(function), payload, timeout_s, loop, loop.create_future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            worker = self._idle.popleft() if self._idle else None
            if worker is None:
                self._waiting.append(task)
        if worker is not None:
            worker.begin(task)
        return await task.future

    def close(self) -> None:
        """Kills the workers and cancels what waits. Safe to call twice, from any thread."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            dropped, self._waiting = self._waiting, deque()
            idle, self._idle = self._idle, deque()
        for worker in self._workers:
            worker.retire()
        for worker in idle:  # the others' loops close theirs
            worker.disconnect()
        for task in dropped:
            _post(task.loop, task.future.cancel)
        for loop, watch in list(self._watches.items()):
            _post(loop, watch.cancel)
        self._starter.shutdown()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_task(self, worker: _Worker, loop: asyncio.AbstractEventLoop | None) -> _Task | None:
        """What ``worker`` runs next if it is for ``loop``; else the worker belongs to others."""
        while True:
            with self._lock:
                if not self._waiting:
                    worker.detach()
                    if self._closed:
                        worker.disconnect()
                    else:
                        self._idle.append(worker)
                    return None
                task = self._waiting.popleft()
            if task.future.done():  # cancelled while it waited
                continue
            if task.loop is loop:
                return task
            worker.detach()
            if _post(task.loop, worker.begin, task):
                return None

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until ``loop`` is about to close, which cancels this; then frees the workers it uses."""
        try:
            await loop.create_future()
        finally:
            del self._watches[loop]
            for worker in self._workers:
                if worker.task is not None and worker.task.loop is loop:
                    worker.abandon()
                    self._next_task(worker, None)


@dataclass(slots=True, eq=False)
class _Task:
    name: str  # of the function, for messages
    payload: bytes  # a frame with the pickled (function, args)
    timeout_s: float | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future  # of that loop


class _Worker:
    """One process and the socket to it, used by one loop at a time, killed by any thread.

    ``next_task(worker, loop)`` gives it its next task, or takes it away from the loop.
    """

    def __init__(
        self,
        greeting: bytes,
        starter: ThreadPoolExecutor,
        next_task: Callable[[_Worker, asyncio.AbstractEventLoop | None], _Task | None],
    ) -> None:
        self.task: _Task | None = None
        self._greeting = greeting
        self._starter = starter
        self._next_task = next_task
        self._lock = threading.Lock()  # between starting and retiring
        self._retired = False
        self._child: Child | None = None
        self._attached: asyncio.AbstractEventLoop | None = None  # that watches the socket
        self._waits_to_send = False
        self._deadline: asyncio.TimerHandle | None = None
        self._restart()  # early, to hide it

    def begin(self, task: _Task) -> None:
        """Runs ``task``, then others of its loop; on that loop."""
        self.task = task
        if self._initialized and (self._attached is not None or self._usable()):
            self._send(task)
        else:
            self._preparing = task.loop.create_task(self._prepare(task))

    def detach(self) -> None:
        """Leaves the loop; on that loop."""
        if self._attached is not None:
            assert self._child is not None
            self._attached.remove_reader(self._child.socket)
            if self._waits_to_send:
                self._attached.remove_writer(self._child.socket)
            self._waits_to_send = False
            self._attached = None

    def abandon(self) -> None:
        """Gives up the task: its loop is about to close. The next one starts another process."""
        assert self.task is not None
        self._end_task(WorkerDied(f"the loop that waited for {self.task.name} was closed"))
        self.detach()
        self._started.cancel()
        self._kill()

    def retire(self) -> None:
        """Kills the process for good."""
        with self._lock:
            self._retired = True
            if self._child is not None:
                self._child.kill()

    def disconnect(self) -> None:
        assert self._attached is None
        if self._child is not None:
            self._child.socket.close()

    # -- starting ----------------------------------------------------------------------------

    def _restart(self) -> None:
        self._initialized = False
        self._frames = FrameSplitter()
        with self._lock:
            if not self._retired:
                self._started: Future[Child] = self._starter.submit(self._start)

    def _start(self) -> Child:
        with self._lock:
            if self._retired:
                raise WorkerDied("the worker pool was closed")
            child = self._child = start_child(ENTRY)
        child.socket.settimeout(START_SEND_TIMEOUT_S)
        with contextlib.suppress(OSError):  # it died: whoever asks it reads end of file
            child.socket.sendall(self._greeting)
            child.socket.setblocking(False)
        return child

    def _usable(self) -> bool:
        if self._started.cancelled() or self._started.exception() is not None:
            return False
        return self._started.result().alive()

    async def _prepare(self, task: _Task) -> None:
        """Has a process ready for ``task``; one that died while idle is no task's fault."""
        try:
            if self._started.done() and not self._usable():
                self.disconnect()
                self._restart()
            await asyncio.wrap_future(self._started)
            if self._retired:
                raise WorkerDied(f"the worker pool was closed before {task.name} ran")
        except Exception as error:  # it cannot be started
            return self._finish(error)
        self._attach(task.loop)
        if self._initialized:
            self._send(task)
        # else the answer to the initializer comes first

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._child is not None
        loop.add_reader(self._child.socket, self._on_readable)
        self._attached = loop

    # -- a task ------------------------------------------------------------------------------

    def _send(self, task: _Task) -> None:
        assert self._child is not None
        if self._attached is None:
            self._attach(task.loop)
        if task.timeout_s is not None:
            self._deadline = task.loop.call_later(task.timeout_s, self._on_deadline, task)
        self._send_rest(memoryview(task.payload))

    def _send_rest(self, rest: memoryview) -> None:
        assert self._child is not None and self._attached is not None
        try:
            rest = rest[self._child.socket.send(rest) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone: the socket reads end of file
            rest = rest[:0]
        if rest:
            self._attached.add_writer(self._child.socket, self._send_rest, rest)
            self._waits_to_send = True
        elif self._waits_to_send:
            self._attached.remove_writer(self._child.socket)
            self._waits_to_send = False

    def _on_readable(self) -> None:
        assert self._child is not None
        try:
            data = self._child.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._finish(self._death())
        for payload in self._frames.feed(data):  # there is one at most
            self._on_answer(payload)

    def _on_answer(self, payload: bytes) -> None:
        assert self.task is not None
        try:
            value = pickle.loads(payload)
        except Exception as error:  # of a class that is the worker's alone
            return self._finish(error)
        failure = value.exception() if isinstance(value, Failure) else None
        if self._initialized:
            self._finish(failure, value)
        elif failure is None:
            self._initialized = True
            self._send(self.task)
        else:  # half-started: the next task has to meet the same failure
            self.detach()
            self._kill()
            self._finish(failure)

    def _on_deadline(self, task: _Task) -> None:
        self.detach()
        self._kill()
        self._restart()
        self._finish(
            WorkerTimeout(
                f"{task.name} took longer than {task.timeout_s:g} s; its worker process was killed"
            )
        )

    def _finish(self, error: BaseException | None, value: Any = None) -> None:
        """Answers the task and begins the next one."""
        task = self._end_task(error, value)
        following = self._next_task(self, task.loop)
        if following is not None:
            self.begin(following)

    def _end_task(self, error: BaseException | None = None, value: Any = None) -> _Task:
        task, self.task = self.task, None
        assert task is not None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not task.future.done():
            if error is not None:
                task.future.set_exception(error)
            else:
                task.future.set_result(value)
        return task

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        self.disconnect()

    def _death(self) -> WorkerDied:
        """What it was doing and how it ended; it is replaced."""
        assert self.task is not None and self._child is not None
        what = self.task.name if self._initialized else "the initializer of the workers"
        how = self._child.ending()
        self.detach()
        self.disconnect()
        self._restart()
        if self._retired:
            return WorkerDied(f"the worker pool was closed while {what} ran")
        return WorkerDied(f"the worker process running {what} ended unexpectedly: {how}")


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> bool:
    """Has ``loop`` run a function; False if it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
        return True
    return False


def _nothing() -> None:
    """The initializer where none is given."""


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return repr(function)
