"""Processes that can be killed when a task hangs: rewards run here.

Nothing is shared between workers: a death belongs to exactly one task.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from easyrl.runtime.process_guard import ProcessGuard
from easyrl.runtime.workers.child_process import Failure, new_mark
from easyrl.runtime.workers.supervised_child import SupervisedChild
from easyrl.runtime.workers.worker_process import ENTRY, main_script

T = TypeVar("T")

# Tasks that wait are sent to a busy worker, too, while what it has takes it no longer than this: an
# answer does not have to come here before the next task begins, and many travel together. If it
# takes longer than this with the first one, an idle worker gets those behind it as well.
AHEAD_S = 0.02
MOST_AHEAD = 32
NEWEST_SHARE = 0.1  # of the last task in the running mean of how long one takes


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
        # what waits, and what waits behind that
        self._waiting: tuple[deque[_Task], deque[_Task]] = deque(), deque()
        self._mean_s: dict[Hashable, float] = {}  # that a task takes, by kind
        self._running = False
        self._look: asyncio.TimerHandle | None = None  # for workers that have become late

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
        if self._look is not None:
            self._look.cancel()
        await asyncio.gather(*(worker.close() for worker in self._workers))
        for worker in self._workers:
            if worker.tasks:
                name = worker.tasks[0].name
                worker.give_up(WorkerDied(f"the worker pool was closed while {name} ran"))
        while task := self.next_task():
            task.future.cancel()
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(guard.release)

    async def call(
        self,
        function: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        kind: Hashable = None,
        last: bool = False,
    ) -> T:
        """``function(*args)`` in a worker; tasks start in the order of the calls, ``last`` ones
        when no other waits.

        ``function``, ``args`` and the result are pickled. ``timeout_s`` counts from when a worker
        begins the task, not from the call. Tasks of a ``kind`` take about as long as each other:
        short ones are sent to a worker together, and may run twice if the first of them is not
        short. Raises ``WorkerTimeout``, ``WorkerDied``, or what
        the function raised, with the remote traceback as its cause. Cancelling drops a task that
        waits; of one that a worker has been sent the result is dropped.
        """
        if not self._running:
            raise RuntimeError("the worker pool is closed")
        payload = pickle.dumps((function, args), 5)
        future = asyncio.get_running_loop().create_future()
        self._waiting[last].append(_Task(_name(function), kind, payload, timeout_s, future, last))
        self.assign()
        return await future

    def assign(self) -> None:
        """Gives waiting tasks to workers, and replaces processes that have ended."""
        if not self._running:
            return
        late = [worker for worker in self._workers if worker.is_late]
        if any(worker.tasks_behind for worker in late) and any(w.is_idle for w in self._workers):
            for worker in late:
                self.wait_again(worker.give_back())
        for worker in self._workers:
            if not any(self._waiting):
                break
            if worker.is_idle and (task := self.next_task()):
                worker.take(task)
            else:
                worker.ensure_started()
        while any(self._waiting):
            ready = [worker for worker in self._workers if worker.may_take_more]
            if not ready or (task := self.next_task()) is None:
                break
            min(ready, key=lambda worker: len(worker.tasks)).take(task)
        if self._look is None and any(worker.tasks_behind for worker in self._workers):
            self._look = asyncio.get_running_loop().call_later(AHEAD_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.assign()

    def wait_again(self, tasks: list[_Task]) -> None:
        """Before all like them: they were sent to a worker that did not begin them."""
        for task in reversed(tasks):
            self._waiting[task.last].appendleft(task)

    def expected_s(self, task: _Task) -> float:
        return self._mean_s.get(task.kind, AHEAD_S)

    def saw(self, task: _Task, took_s: float) -> None:
        mean_s = self._mean_s.get(task.kind, took_s)
        self._mean_s[task.kind] = mean_s + NEWEST_SHARE * (took_s - mean_s)

    def next_task(self) -> _Task | None:
        """The one that has waited longest, no longer waiting."""
        for waiting in self._waiting:
            while waiting:
                task = waiting.popleft()
                if not task.future.done():  # else it was cancelled
                    return task
        return None


@dataclass(slots=True, eq=False)
class _Task:
    name: str  # of the function, for messages
    kind: Hashable
    payload: bytes  # the pickled (function, args)
    timeout_s: float | None
    future: asyncio.Future
    last: bool
    expected_s: float = 0.0  # that it takes, when a worker was sent it

    def dropped(self) -> _Task:
        """It, of which nobody wants the result."""
        future = self.future.get_loop().create_future()
        future.cancel()
        return replace(self, future=future)


class _Worker(SupervisedChild):
    """One process at a time, the task that it runs, and those behind that it has been sent."""

    def __init__(self, greeting: bytes, pool: WorkerPool, environment: Mapping[str, str]) -> None:
        super().__init__(ENTRY, greeting, environment)
        self.tasks: deque[_Task] = deque()  # it runs the first, and answers in their order
        self._expected_s = 0.0  # that they take together
        self._pool = pool
        self._initialized = False
        self._outbox: list[bytes] = []
        self._begun_s = 0.0  # when the first became the first
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self.tasks and self._initialized and self.alive

    @property
    def is_late(self) -> bool:
        """With the first task."""
        now_s = asyncio.get_running_loop().time()
        return bool(self.tasks) and now_s - self._begun_s > AHEAD_S

    @property
    def tasks_behind(self) -> list[_Task]:
        """Those that wait for the first."""
        return [task for task in islice(self.tasks, 1, None) if not task.future.done()]

    @property
    def may_take_more(self) -> bool:
        """What it has is little, and goes on."""
        if len(self.tasks) > MOST_AHEAD or self._expected_s >= AHEAD_S:
            return False
        return self._initialized and not self.is_late and self.alive

    def give_back(self) -> list[_Task]:
        """The tasks behind the first, for others to do.

        This one does them, too, as it has been sent them; what it answers then is dropped.
        """
        behind = self.tasks_behind
        first, *others = self.tasks
        self.tasks = deque([first, *(task.dropped() for task in others)])
        return behind

    def take(self, task: _Task) -> None:
        if not self._outbox:  # travels with others of this turn of the loop
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(task.payload)
        self.tasks.append(task)
        task.expected_s = self._pool.expected_s(task)
        self._expected_s += task.expected_s
        if len(self.tasks) == 1:
            self._start_clock()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self.send(*outbox)

    def _start_clock(self) -> None:
        """The first task begins."""
        loop, task = asyncio.get_running_loop(), self.tasks[0]
        self._begun_s = loop.time()
        if task.timeout_s is not None:
            self._deadline = loop.call_later(task.timeout_s, self._on_deadline, task)

    def _finish(self, error: BaseException | None, value: Any = None) -> None:
        """The first task ends; nothing happens if there is none."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not self.tasks:
            return
        task = self.tasks.popleft()
        self._expected_s -= task.expected_s
        if not task.future.done():
            if error is not None:
                task.future.set_exception(error)
            else:
                task.future.set_result(value)

    def give_up(self, error: BaseException) -> None:
        """The process has ended, or will: that is the first task's, the others wait again."""
        self._finish(error)
        self._outbox = []
        self._pool.wait_again(list(self.tasks))
        self.tasks.clear()
        self._expected_s = 0.0

    def on_message(self, payload: bytes) -> None:
        if self._initialized and self.tasks:
            self._pool.saw(self.tasks[0], asyncio.get_running_loop().time() - self._begun_s)
            try:
                value = pickle.loads(payload)
            except Exception as error:  # of a class that is the worker's alone
                self._finish(error)
            else:
                self._finish(value.exception() if isinstance(value, Failure) else None, value)
            if self.tasks:
                self._start_clock()
        self._initialized = True
        self._pool.assign()

    def on_end(self, how: str) -> None:
        what = "the initializer of the workers"
        if self._initialized:
            what = self.tasks[0].name if self.tasks else "no task"
        elif (task := self._pool.next_task()) is not None:
            self.tasks.append(task)  # one has to meet that, else process after process is started
        self._initialized = False
        self.give_up(WorkerDied(f"the worker process running {what} ended unexpectedly: {how}"))
        self._pool.assign()

    def _on_deadline(self, task: _Task) -> None:
        what = f"{task.name} took longer than {task.timeout_s:g} s"
        self._pool.saw(task, asyncio.get_running_loop().time() - self._begun_s)
        self.kill(what)
        self.give_up(WorkerTimeout(f"{what}; its worker process was killed"))
        self._pool.assign()


def _nothing() -> None: ...


def _name(function: Callable[..., object]) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return f"{function.__module__}.{function.__qualname__}"
    return repr(function)
