"""Workers: results, errors, hangs, deaths, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from easyrl.runtime.workers import supervised_child
from easyrl.runtime.workers.child_process import RemoteTraceback
from easyrl.runtime.workers.worker_pool import (
    AHEAD_S,
    WorkerDied,
    WorkerPool,
    WorkerTimeout,
)
from tests.waiting import started, wait_until


class TwoArgumentError(Exception):
    """Pickles, and cannot be unpickled: its arguments are not those of ``__init__``."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def double(number: int) -> int:
    return 2 * number


def fail(kind: type[BaseException], *args: str) -> None:
    raise kind(*args)


def make_unpicklable() -> object:
    return threading.Lock()


def hold_the_gil(path: str) -> None:
    """Never returns to the interpreter: no Python thread of this process runs any more."""
    Path(path).write_text(str(os.getpid()))
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def spawn_child_and_hang(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(path).write_text(str(child.pid))
    child.wait()


def start_elsewhere(path: str, then: str) -> None:
    """Starts a process in a session of its own, whose parent ends at once: nobody's child."""
    code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
    code += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code, f"{path}.part"], check=True)
    wait_until(lambda: has_text(Path(f"{path}.part")))
    Path(f"{path}.part").rename(path)
    if then == "hang":
        time.sleep(1000)
    elif then == "die":
        os._exit(3)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def loaded_modules() -> list[str]:
    return list(sys.modules)


def sleep_and_stop_a_child(path: str) -> int:
    """The status of a child that was sent SIGTERM, after some time in which this process may be."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(0.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    child.terminate()
    return child.wait()


STATE: list[int] = []


def append_state(value: int) -> list[int]:
    STATE.append(value)
    return STATE


def read_state() -> list[int]:
    return STATE


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    async with started(WorkerPool(2)) as workers:
        yield workers


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended, its parent has not asked yet


async def test_results_of_many_calls_come_back_to_their_callers(pool):
    assert await asyncio.gather(*[pool.call(double, i) for i in range(300)]) == [
        2 * i for i in range(300)
    ]


async def test_two_workers_run_at_the_same_time(pool, tmp_path):
    pids = await asyncio.gather(*[pool.call(meet, str(tmp_path), i) for i in range(2)])
    assert len(set(pids)) == 2


def meet(folder: str, i: int) -> int:
    """Returns only when its twin has been started."""
    Path(folder, str(i)).touch()
    wait_until(Path(folder, str(1 - i)).exists)
    return os.getpid()


def test_a_pool_may_belong_to_a_loop_in_any_thread():
    async def main() -> None:
        async with started(WorkerPool(1)) as pool:
            results.append(await pool.call(double, 21))

    results: list[int] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(60)
    assert results == [42]


async def test_what_is_larger_than_a_socket_holds_arrives_whole(pool):
    payload = os.urandom(5_000_000)
    assert await pool.call(bytes.upper, payload) == payload.upper()


async def test_exception_arrives_with_the_remote_traceback(pool):
    with pytest.raises(ZeroDivisionError, match="nope") as caught:
        await pool.call(fail, ZeroDivisionError, "nope")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "raise kind(*args)" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "kind, args",
    [(TwoArgumentError, ("a", "b")), (SystemExit, ("3",)), (StopIteration, ("3",))],
)
async def test_exceptions_that_cannot_travel_are_described(pool, kind, args):
    with pytest.raises(RuntimeError, match=kind.__name__):
        await pool.call(fail, kind, *args)
    assert await pool.call(double, 1) == 2


async def test_unpicklable_results_and_arguments_fail_alone(pool):
    with pytest.raises(TypeError, match="pickle"):
        await pool.call(make_unpicklable)
    with pytest.raises(TypeError, match="pickle"):
        await pool.call(double, threading.Lock())
    assert await pool.call(double, 1) == 2


async def test_timeout_kills_and_replaces_the_worker(tmp_path):
    async with started(WorkerPool(1)) as pool:
        before = await pool.call(os.getpid)
        with pytest.raises(WorkerTimeout, match=r"test_worker_pool\.hold_the_gil took .* 0\.5 s"):
            await pool.call(hold_the_gil, str(tmp_path / "pid"), timeout_s=0.5)
        after = await pool.call(os.getpid)
        assert after != before and not alive(before)


async def test_timeout_kills_what_the_task_had_started(pool, tmp_path):
    path = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        await pool.call(spawn_child_and_hang, str(path), timeout_s=2)
    wait_until(lambda: not alive(int(path.read_text())))


@pytest.mark.parametrize("then", ["hang", "die", "return"])
async def test_nothing_that_a_task_has_started_outlives_its_worker(tmp_path, then):
    """Neither a session of its own nor a parent that has ended hides it."""
    path = tmp_path / "pid"
    async with started(WorkerPool(1)) as pool:
        call = pool.call(start_elsewhere, str(path), then, timeout_s=5 if then == "hang" else None)
        with contextlib.suppress(WorkerTimeout, WorkerDied):
            await call
        pid = int(path.read_text())
        if then == "return":
            assert alive(pid)  # it may be there for the next task
        else:
            await asyncio.to_thread(wait_until, lambda: not alive(pid))
    assert not alive(pid)


async def test_a_worker_that_cannot_be_killed_holds_nobody_up(monkeypatch, caplog, tmp_path):
    """As one that waits for a disk in the kernel: it is left behind, and replaced."""
    monkeypatch.setattr(supervised_child, "END_LIMIT_S", 1.0)
    kill, killpg, stuck = os.kill, os.killpg, []

    def sparing(send):
        return lambda pid, number: None if pid in stuck else send(pid, number)

    monkeypatch.setattr(os, "kill", sparing(kill))
    monkeypatch.setattr(os, "killpg", sparing(killpg))
    pool, gaps = WorkerPool(2), []
    await pool.start()
    try:
        call = asyncio.ensure_future(
            pool.call(spawn_child_and_hang, str(tmp_path / "pid"), timeout_s=1.0)
        )
        await asyncio.to_thread(wait_until, lambda: has_text(tmp_path / "pid"))
        worker = int(Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat").read_text().split()[3])
        kill(worker, signal.SIGSTOP)
        stuck.append(worker)
        with pytest.raises(WorkerTimeout):
            await call
        begun_s = time.monotonic()
        pids = set()
        while len(pids) < 2:  # the other worker, then the one that replaces it
            looked_s = time.monotonic()
            pids |= set(await asyncio.gather(*[pool.call(os.getpid) for _ in range(4)]))
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - looked_s)
        assert worker not in pids and time.monotonic() - begun_s < 15
        assert max(gaps) < 1.0  # the loop went on
        begun_s = time.monotonic()
        await pool.close()
        assert time.monotonic() - begun_s < 10 and f"[{worker}" in caplog.text
    finally:
        stuck.clear()
        killpg(worker, signal.SIGKILL)


def has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


@pytest.mark.parametrize(
    "function, args, how",
    [
        (os._exit, (7,), "exit code 7"),
        (signal.raise_signal, (signal.SIGSEGV,), "SIGSEGV"),
        (signal.raise_signal, (signal.SIGKILL,), "out of memory"),
    ],
)
async def test_a_death_is_the_running_tasks_and_the_worker_is_replaced(function, args, how):
    async with started(WorkerPool(1)) as pool:
        results = await asyncio.gather(
            pool.call(double, 1),
            pool.call(function, *args),
            pool.call(double, 2),
            return_exceptions=True,
        )
    assert results[0] == 2 and results[2] == 4
    assert isinstance(results[1], WorkerDied) and how in str(results[1])


# ---- short tasks, several of which a worker has been sent --------------------------------------


def note_and(path: str, then: str) -> str:
    """Notes that it has begun; ``then`` says how it ends."""
    with Path(path).open("a") as file:
        file.write(f"{then} {os.getpid()}\n")
    if then == "hang":
        time.sleep(1000)
    elif then == "die":
        os._exit(3)
    elif then == "raise":
        raise ValueError("no")
    return then


async def learn_that_tasks_are_short(pool: WorkerPool) -> None:
    async with asyncio.timeout(20):
        while pool._mean_s.get("short", AHEAD_S) > AHEAD_S / 5:  # the first one imports this file
            await pool.call(double, 1, kind="short")


@pytest.mark.parametrize(
    "then, error", [("hang", WorkerTimeout), ("die", WorkerDied), ("raise", ValueError)]
)
async def test_of_tasks_that_were_sent_together_one_fails_alone(tmp_path, then, error):
    path = str(tmp_path / "begun")
    asked = ["ok", "ok", then, "ok", "ok"]
    async with started(WorkerPool(1)) as pool:
        await learn_that_tasks_are_short(pool)
        calls = [pool.call(note_and, path, how, timeout_s=1.0, kind="short") for how in asked]
        results = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        (worker,) = pool._workers
        assert len(worker.tasks) == len(asked)
        results = await results
    assert [result for result in results if result != "ok"] == [results[2]]
    assert type(results[2]) is error
    begun = [line.split() for line in Path(path).read_text().splitlines()]
    assert [how for how, _ in begun] == asked  # each once, in the order of the calls
    assert len({pid for _, pid in begun}) == (1 if then == "raise" else 2)


async def test_a_task_of_a_kind_that_takes_long_is_sent_to_an_idle_worker_only(tmp_path):
    path = tmp_path / "begun"
    async with started(WorkerPool(1)) as pool:
        await learn_that_tasks_are_short(pool)
        hanging = asyncio.ensure_future(
            pool.call(note_and, str(path), "hang", timeout_s=0.5, kind="unknown")
        )
        await asyncio.to_thread(wait_until, path.exists)
        waiting = asyncio.ensure_future(pool.call(double, 2, kind="short"))
        await asyncio.sleep(0)
        (worker,) = pool._workers
        assert len(worker.tasks) == 1 and len(pool._waiting[0]) == 1
        with pytest.raises(WorkerTimeout):
            await hanging
        assert await waiting == 4


def wait_for(path: str) -> int:
    """Until there is such a file; the process that did."""
    wait_until(Path(path).exists)
    return os.getpid()


async def two_idle_workers(pool: WorkerPool) -> list:
    """They have imported this file; "short" tasks are known to be so."""
    async with asyncio.timeout(20):
        while not all(worker.is_idle for worker in pool._workers):
            await asyncio.sleep(0.01)
    await asyncio.gather(*[pool.call(double, 1) for _ in pool._workers])
    pool._mean_s["short"] = AHEAD_S / 100
    return pool._workers


async def test_tasks_behind_one_that_takes_long_are_done_by_an_idle_worker(pool, tmp_path):
    go_on = tmp_path / "go_on"
    await two_idle_workers(pool)
    slow = asyncio.ensure_future(pool.call(wait_for, str(go_on), kind="short"))
    calls = [asyncio.ensure_future(pool.call(double, n, kind="short")) for n in range(19)]
    await asyncio.sleep(0)
    assert [len(worker.tasks) for worker in pool._workers] == [10, 10]
    assert await asyncio.wait_for(asyncio.gather(*calls), 20) == [2 * n for n in range(19)]
    assert not slow.done()
    go_on.touch()
    await slow
    # what it was given and has done by now was dropped; what comes now is answered in order
    assert await asyncio.gather(*[pool.call(double, n, kind="short") for n in range(40)]) == [
        2 * n for n in range(40)
    ]
    async with asyncio.timeout(20):
        while any(worker.tasks for worker in pool._workers):
            await asyncio.sleep(0.01)


async def test_a_time_out_counts_as_what_the_task_took():
    async with started(WorkerPool(1)) as pool:
        await learn_that_tasks_are_short(pool)
        with pytest.raises(WorkerTimeout):
            await pool.call(time.sleep, 1000, timeout_s=0.5, kind="short")
        assert pool._mean_s["short"] > AHEAD_S


@pytest.mark.parametrize("other", ["down", "late"])
async def test_short_tasks_are_sent_to_the_worker_that_takes_them(pool, tmp_path, other):
    """And not held back by one that has less to do and cannot begin it."""
    go_on = tmp_path / "go_on"
    busy, free = await two_idle_workers(pool)
    if other == "down":
        busy._initialized = False  # as one that is being replaced
        slow = None
    else:
        slow = asyncio.ensure_future(pool.call(wait_for, str(go_on), kind="unknown"))
        await asyncio.sleep(2 * AHEAD_S)
        assert len(busy.tasks) == 1 and not free.tasks
    calls = [asyncio.ensure_future(pool.call(double, n, kind="short")) for n in range(8)]
    await asyncio.sleep(0)
    assert len(free.tasks) == 8
    assert await asyncio.gather(*calls) == [2 * n for n in range(8)]
    go_on.touch()
    if slow is not None:
        await slow


async def test_tasks_that_come_last_wait_for_all_others(tmp_path):
    path = tmp_path / "begun"
    async with started(WorkerPool(1)) as pool:
        busy = asyncio.ensure_future(pool.call(note_and, str(path), "hang", timeout_s=0.5))
        await asyncio.to_thread(wait_until, path.exists)
        names = ["last", "last", "first", "first"]
        calls = [
            asyncio.ensure_future(pool.call(note_and, str(path), name, last=name == "last"))
            for name in names
        ]
        with pytest.raises(WorkerTimeout):
            await busy
        await asyncio.gather(*calls)
    begun = [line.split()[0] for line in path.read_text().splitlines()]
    assert begun == ["hang", "first", "first", "last", "last"]


async def test_what_a_closed_pool_had_sent_ahead_is_cancelled(tmp_path):
    path = tmp_path / "begun"
    pool = WorkerPool(1)
    await pool.start()
    await learn_that_tasks_are_short(pool)
    hows = ("hang", "ok", "ok")
    calls = [asyncio.ensure_future(pool.call(note_and, str(path), h, kind="short")) for h in hows]
    await asyncio.to_thread(wait_until, path.exists)
    (worker,) = pool._workers
    assert len(worker.tasks) == 3
    await pool.close()
    with pytest.raises(WorkerDied, match="closed while .*note_and ran"):
        await calls[0]
    for call in calls[1:]:
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_sigterm_leaves_a_running_task_alone(pool, tmp_path):
    """DeepSpeed's launcher sends it to all below a rank, which stops as *it* sees fit.

    What the task starts itself can still be stopped.
    """
    running = asyncio.ensure_future(pool.call(sleep_and_stop_a_child, str(tmp_path / "pid")))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert await running == -signal.SIGTERM


async def test_a_worker_that_dies_while_idle_fails_no_task():
    async with started(WorkerPool(1)) as pool:
        pid = await pool.call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        assert await pool.call(double, 4) == 8


async def test_initializer_runs_in_each_new_process_and_its_failure_is_told():
    async with started(WorkerPool(1, append_state, (5,))) as pool:
        assert await pool.call(read_state) == [5]
        with pytest.raises(WorkerDied):
            await pool.call(os._exit, 1)
        assert await pool.call(read_state) == [5]
    async with started(WorkerPool(1, fail, (ValueError, "bad settings"))) as pool:
        with pytest.raises(ValueError, match="bad settings"):
            await pool.call(double, 1)


async def test_an_initializer_that_ends_its_process_fails_the_tasks():
    async with started(WorkerPool(1, os._exit, (3,))) as pool:
        for _ in range(2):
            with pytest.raises(WorkerDied, match=r"initializer of the workers ended .*exit code 3"):
                await asyncio.wait_for(pool.call(double, 1), 60)


async def test_tasks_fail_when_no_process_can_be_started(monkeypatch):
    def break_down(*_: object) -> None:
        raise OSError("no process left")

    async with started(WorkerPool(1)) as pool:
        with monkeypatch.context() as broken:
            broken.setattr(supervised_child, "start_child", break_down)
            with pytest.raises(WorkerDied, match="exit code 3"):
                await pool.call(os._exit, 3)
            with pytest.raises(WorkerDied, match="can be started: OSError: no process left"):
                await asyncio.wait_for(pool.call(double, 1), 60)
        assert await pool.call(double, 1) == 2


async def test_cancelling_drops_a_task_that_waits(tmp_path):
    async with started(WorkerPool(1)) as pool:
        blocker = asyncio.ensure_future(pool.call(meet, str(tmp_path), 0))
        dropped = asyncio.ensure_future(pool.call(Path.touch, tmp_path / "dropped"))
        kept = asyncio.ensure_future(pool.call(double, 3))
        await asyncio.sleep(0)
        dropped.cancel()
        (tmp_path / "1").touch()  # lets the blocker return
        await blocker
        assert await kept == 6
        assert not (tmp_path / "dropped").exists()


async def test_close_kills_hung_workers_and_cancels_what_waits(tmp_path):
    pool = WorkerPool(1)
    with pytest.raises(RuntimeError, match="closed"):
        await pool.call(double, 1)
    await pool.start()
    hung = asyncio.ensure_future(pool.call(hold_the_gil, str(tmp_path / "pid")))
    waiting = asyncio.ensure_future(pool.call(double, 1))
    path = tmp_path / "pid"
    await asyncio.to_thread(wait_until, lambda: path.exists() and path.read_text())
    await pool.close()
    with pytest.raises(WorkerDied, match="closed"):
        await hung
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not alive(int((tmp_path / "pid").read_text()))
    with pytest.raises(RuntimeError, match="closed"):
        await pool.call(double, 1)
    await pool.close()


async def test_workers_are_single_threaded_and_light(pool):
    assert await pool.call(environment, "OMP_NUM_THREADS") == "1"
    assert "torch" not in await pool.call(loaded_modules)


@pytest.mark.parametrize(
    "module",
    [
        "easyrl.runtime.workers.worker_pool",
        "easyrl.runtime.workers.worker_process",
        "easyrl.schema",
        "easyrl.config",
        "easyrl.inference_client.client",
        "easyrl.inference_client.fetching.fetcher_pool",
        "easyrl.inference_client.pool.endpoint_pool",
    ],
)
def test_modules_that_workers_import_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


PARENT = """
    import asyncio, os, re, signal, sys
    from pathlib import Path
    from easyrl.runtime.workers.worker_pool import WorkerPool

    def work(path):
        Path(path).write_text(str(os.getpid()))
        re.match(r"(a+)+$", "a" * 64 + "b")

    async def main():
        pool = WorkerPool(2)
        await pool.start()
        try:
            idle = await pool.call(os.getpid)
            print(idle, flush=True)
            await pool.call(work, sys.argv[1])
        finally:
            await pool.close()

    if __name__ == "__main__":
        # ignored where the tests run as a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio.run(main())
"""


@contextlib.contextmanager
def parent_with_busy_worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A process in a group of its own, with its workers and their guard.

    One worker is idle, one holds its GIL.
    """
    script, path = tmp_path / "parent.py", tmp_path / "pid"
    script.write_text(textwrap.dedent(PARENT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    try:
        first = int(process.stdout.readline())
        wait_until(lambda: path.exists() and path.read_text() != "")
        children = Path(f"/proc/{process.pid}/task").glob("*/children")
        pids = {int(pid) for file in children for pid in file.read_text().split()}
        assert {first, int(path.read_text())} <= pids and len(pids) == 3
        yield process, sorted(pids)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_workers_end_when_the_parent_is_killed(tmp_path):
    with parent_with_busy_worker(tmp_path) as (process, pids):
        process.kill()
        wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_ends_the_parent_and_leaves_no_worker(tmp_path):
    with parent_with_busy_worker(tmp_path) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole group
        errors = process.communicate(timeout=20)[1].decode()
        wait_until(lambda: not any(map(alive, pids)))
        assert "KeyboardInterrupt" in errors and "worker_main" not in errors


STARTING_PARENT = """
    import asyncio, subprocess, sys
    from easyrl.runtime.workers.worker_pool import WorkerPool

    def start(apart):
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        return subprocess.Popen(command, start_new_session=apart).pid

    async def main():
        pool = WorkerPool(1)
        await pool.start()
        for apart in (False, True):
            print(await pool.call(start, apart), flush=True)
        await asyncio.sleep(1000)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_nothing_that_tasks_have_started_outlives_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(STARTING_PARENT))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        parent.kill()
        wait_until(lambda: not any(map(alive, pids)))
