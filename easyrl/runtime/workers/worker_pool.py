"""Processes that can be killed when a task hangs: rewards run here.

Nothing is shared between workers: a death belongs to exactly one task.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from easyrl.runtime.process_guard import ProcessGuard
from easyrl.runtime.workers.child_process import Failure, new_mark
from easyrl.runtime.workers.supervised_child import SupervisedChild
from easyrl.runtime.workers.worker_process import ENTRY, main_script

T = TypeVar("T")


class WorkerTimeout(TimeoutError):
    """A task ran for longer than it was allowed; its process was killed and is replaced."""


class WorkerDied(RuntimeError):
    """The process ended while it ran a task (segmentation fault, ``os._exit``, out of memory)."""


class WorkerPool:
    """``num_workers`` processes that run functions for one asyncio loop.

    Workers are new interpreters that import only what their tasks need (not the main script, unless
    a task lives in it; then the script needs its ``if __name__ == "__main__":``). Neither ``close``
    nor a parent that is killed leaves a process behind, of theirs or that a task has started.

    ``initializer`` is called with ``initargs`` in each new process before its first task. If it
    raises, the tasks raise its exception.
    """

    def __init__(
        self,
        num_workers: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        greeting = main_script(), pickle.dumps((initializer or _nothing, initargs))
        self._mark = new_mark()
        self._workers = [
            _Worker(pickle.dumps(greeting), self, {self._mark: ""}) for _ in range(num_workers)
        ]
        self._guard: ProcessGuard | None = None  # while it runs
        self._waiting: deque[_Task] = deque()
        self._running = False

    async def start(self) -> None:
        """Starts the processes; calls belong to this loop, and its thread, from now on."""
        self._running = True
        self._guard = ProcessGuard()
        self._guard.watch_marked(self._mark)
        for worker in self._workers:
            worker.ensure_started()

    async def close(self) -> None:
        """Kills the workers and cancels what waits. Safe to call twice."""
        self._running = False
        await asyncio.gather(*(worker.close() for worker in self._workers))
        for worker in self._workers:
            if worker.task is not None:
                name = worker.task.name
                worker.finish(WorkerDied(f"the worker pool was closed while {name} ran"))
        while task := self.next_task():
            task.future.cancel()
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(guard.release)

    async def call(
        self, function: Callable[..., T], *args: Any, timeout_s: float | None = None
    ) -> T:
        """``function(*args)`` in a worker; tasks start in the order of the calls.

        ``function``, ``args`` and the result are pickled. ``timeout_s`` counts from when a worker
        takes the task, not from the call. Raises ``WorkerTimeout``, ``WorkerDied``, or what the
        function raised, with the remote traceback as its cause. Cancelling drops a task that waits;
        one that runs is finished or timed out, and its result is dropped.
        """
        if not self._running:
            raise RuntimeError("the worker pool is closed")
        payload = pickle.dumps((function, args), 5)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Task(_name(function), payload, timeout_s, future))
        self.assign()
        return await future

    def assign(self) -> None:
        """Gives waiting tasks to idle workers, and replaces processes that have ended."""
        for worker in self._workers:
            if not self._waiting or not self._running:
                return
            if worker.is_idle and (task := self.next_task()):
                worker.begin(task)
            else:
                worker.ensure_started()

    def next_task(self) -> _Task | None:
        """The one that has waited longest, no longer waiting."""
        while self._waiting:
            task = self._waiting.popleft()
            if not task.future.done():  # else it was cancelled
                return task
        return None


@dataclass(slots=True, eq=False)
class _Task:
    name: str  # of the function, for messages
    payload: bytes  # the pickled (function, args)
    timeout_s: float | None
    future: asyncio.Future


class _Worker(SupervisedChild):
    """One process at a time, and the task that it runs."""

    def __init__(self, greeting: bytes, pool: WorkerPool, environment: Mapping[str, str]) -> None:
        super().__init__(ENTRY, greeting, environment)
        self.task: _Task | None = None
        self._pool = pool
        self._initialized = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.task is None and self._initialized and self.alive

    def begin(self, task: _Task) -> None:
        self.task = task
        self.send(task.payload)
        if task.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(task.timeout_s, self._on_deadline, task)

    def finish(self, error: BaseException | None, value: Any = None) -> None:
        task, self.task = self.task, None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if task is None or task.future.done():
            return
        if error is not None:
            task.future.set_exception(error)
        else:
            task.future.set_result(value)

    def on_message(self, payload: bytes) -> None:
        if self._initialized:
            try:
                value = pickle.loads(payload)
            except Exception as error:  # of a class that is the worker's alone
                self.finish(error)
            else:
                self.finish(value.exception() if isinstance(value, Failure) else None, value)
        self._initialized = True
        self._pool.assign()

    def on_end(self, how: str) -> None:
        what = "the initializer of the workers"
        if self._initialized:
            what = self.task.name if self.task is not None else "no task"
        else:  # a task has to meet that, else process after process would be started
            self.task = self._pool.next_task()
        self._initialized = False
        self.finish(WorkerDied(f"the worker process running {what} ended unexpectedly: {how}"))
        self._pool.assign()

    def _on_deadline(self, task: _Task) -> None:
        what = f"{task.name} took longer than {task.timeout_s:g} s"
        self.kill(what)
        self.finish(WorkerTimeout(f"{what}; its worker process was killed"))


def _nothing() -> None: ...


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return repr(function)
