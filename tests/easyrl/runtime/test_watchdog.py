"""The watchdog: when it fires, what the log then says, and that the run ends. Real processes."""

import asyncio
import queue
import random
import subprocess
import sys
import threading
import time

import pytest

from easyrl.config import WatchdogConfig
from easyrl.metrics.event_log import ignore
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.notices import Notices
from easyrl.runtime.stacks import log_report, task_stacks, thread_stacks
from easyrl.runtime.watchdog import LONGEST_GAP_S, ProgressWindow, TokenProgress, Watchdog

# ---- the window, on a clock of its own -----------------------------------------------------------


def first_alarm_s(window, tokens_at, until_s, *, step_s=1.0, expected=lambda now_s: True):
    """When ``window`` first finds the rate too low, looking every ``step_s``; None: never."""
    looks = round(until_s / step_s)
    for now_s in (look * step_s for look in range(looks + 1)):
        if window.look(now_s, tokens_at(now_s), expected=expected(now_s)) is not None:
            return now_s
    return None


def test_no_token_at_all_in_a_window_is_an_alarm_and_one_is_none():
    assert first_alarm_s(ProgressWindow(100, 0.0), lambda now_s: 0, 1000) == 100
    assert first_alarm_s(ProgressWindow(100, 0.0), lambda now_s: int(now_s // 99), 1000) is None
    stops = ProgressWindow(100, 0.0)
    assert first_alarm_s(stops, lambda now_s: min(int(now_s), 500), 1000) == 600


@pytest.mark.parametrize(("rate", "alarm"), [(9.0, True), (11.0, False)])
def test_steady_progress_is_measured_against_the_rate(rate, alarm):
    window = ProgressWindow(100, 10.0)
    assert (first_alarm_s(window, lambda now_s: int(rate * now_s), 1000) is not None) == alarm


def test_progress_in_bursts_is_a_mean_over_the_window():
    window = ProgressWindow(100, 10.0)  # 1100 tokens at once every 100 s are 11 a second
    assert first_alarm_s(window, lambda now_s: 1100 * int(now_s // 100 + 1), 2000) is None


def test_an_outage_does_not_use_up_the_window():
    window = ProgressWindow(100, 0.0)
    outage = range(50, 500)
    alarm = first_alarm_s(window, lambda _: 0, 1000, expected=lambda now_s: now_s not in outage)
    assert alarm == 100 + len(outage)


def test_a_process_that_was_stopped_is_not_stuck():
    window = ProgressWindow(100, 0.0)
    assert window.look(0.0, 0) is None and window.look(50.0, 5) is None
    assert window.look(100_000.0, 5) is None  # suspended for a day: one look
    assert 10 * LONGEST_GAP_S == 100


def test_random_progress_against_the_definition():
    """The rate of every full window, recomputed from all looks."""
    rng = random.Random(0)
    for _ in range(20):
        window, times, counts = ProgressWindow(20.0, 3.0), [0.0], [0]
        window.look(0.0, 0)
        for _ in range(200):
            times.append(times[-1] + rng.uniform(0.1, 2.0))
            counts.append(counts[-1] + rng.choice([0, 0, 1, 5, 12]))
            found = window.look(times[-1], counts[-1])
            begins = [i for i, t in enumerate(times) if t <= times[-1] - 20.0]
            if not begins:
                assert found is None
                continue
            rate = (counts[-1] - counts[begins[-1]]) / (times[-1] - times[begins[-1]])
            assert (found is not None) == (rate < 3.0)
            assert found is None or found == pytest.approx(rate)


def test_tokens_are_counted_from_the_events_and_the_events_passed_on():
    progress, passed = TokenProgress(), []
    record = progress.counting(lambda event, **fields: passed.append((event, fields)))
    record("response_scored", num_tokens=7, sample=0)
    progress.counting(ignore)("response_scored", num_tokens=2)  # an evaluation's
    record("micro_batch_start", num_tokens=30)
    assert (progress.generated, progress.trained) == (9, 0)  # a forward that hangs is no progress
    record("micro_batch_end")
    record("step", step=1)
    assert progress.tokens == 39
    assert [event for event, _ in passed] == [
        "response_scored",
        "micro_batch_start",
        "micro_batch_end",
        "step",
    ]


# ---- the watchdog, within this process -----------------------------------------------------------


@pytest.fixture
def alarms():
    return queue.Queue()


def watchdog(alarms, *, window_s=0.4, rate=0.0, progress=None, describe=lambda: "", **options):
    return Watchdog(
        WatchdogConfig(window_s=window_s, min_tokens_per_s=rate),
        progress or TokenProgress(),
        describe,
        lambda: alarms.put("end"),
        **options,
    )


def test_a_producer_that_never_answers_is_found_with_its_tasks_queue_and_endpoints(alarms, caplog):
    async def ask_endpoint():
        await asyncio.Event().wait()

    async def group():
        async with asyncio.TaskGroup() as samples:
            for _ in range(3):
                samples.create_task(ask_endpoint())

    never = queue.Queue()
    consumer = threading.Thread(target=never.get, name="consumer", daemon=True)
    consumer.start()
    with LoopThread() as thread:
        pending = thread.submit(group())
        describe = lambda: "0 groups wait\n  http://one: usable, 3 in flight"  # noqa: E731
        with watchdog(alarms, describe=describe, loop=thread.loop):
            assert alarms.get(timeout=10) == "end"
        pending.cancel()
    never.put(None)
    log = caplog.text
    assert "the watchdog ends the run: 0 tokens/s in 0.4 s" in log
    assert "0 groups wait" in log and "http://one: usable, 3 in flight" in log
    assert "thread consumer" in log and "thread easyrl-producer" in log
    assert "thread MainThread" in log and "test_a_producer_that_never_answers" in log
    (three,) = [line for line in log.splitlines() if line.startswith("  3 x ")]
    assert "ask_endpoint" in three and "Event.wait" in three


@pytest.mark.parametrize(("tokens", "fires"), [(1, True), (8, False)], ids=["below", "above"])
def test_slow_but_steady_progress(tokens, fires, alarms):
    """A token every 10 ms is 100 a second; the limit is 300."""
    progress = TokenProgress()
    record = progress.counting(ignore)
    with watchdog(alarms, rate=300.0, progress=progress, window_s=0.5):
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline and alarms.empty():
            record("response_scored", num_tokens=tokens)
            time.sleep(0.01)
    assert alarms.empty() != fires


def test_an_outage_does_not_fire_unless_it_goes_on_for_longer_than_it_may(
    alarms, caplog, monkeypatch
):
    is_outage = threading.Event()
    is_outage.set()
    with watchdog(alarms, in_outage=is_outage.is_set, max_outage_s=60.0):
        time.sleep(1.2)
        assert alarms.empty()
        is_outage.clear()
        assert alarms.get(timeout=10) == "end"  # the endpoints are back, and nothing comes
    monkeypatch.setattr("easyrl.runtime.watchdog.OUTAGE_SLACK_S", 0.1)
    with watchdog(alarms, in_outage=lambda: True, max_outage_s=0.2):
        assert alarms.get(timeout=10) == "end"


def test_without_a_window_there_is_no_watchdog(alarms):
    before = threading.active_count()
    with watchdog(alarms, window_s=0.0):
        assert threading.active_count() == before


def test_a_run_that_ends_ends_its_watchdog(alarms):
    with watchdog(alarms, window_s=0.6):
        time.sleep(0.1)
    time.sleep(0.9)
    assert alarms.empty()


def test_the_watchdog_of_one_rank_has_the_others_log_their_stacks(alarms, caplog):
    class Shared(dict):
        set = dict.__setitem__

        def check(self, keys):
            return keys[0] in self

        def get(self, key):
            return self[key].encode()

    store, progress, done = Shared(), TokenProgress(), threading.Event()

    def go_on():  # the other rank is well: the culprit need not be the one that fires
        while not done.wait(0.02):
            progress.counting(ignore)("response_scored", num_tokens=1)

    threading.Thread(target=go_on, daemon=True).start()
    others = queue.Queue()
    try:
        with (
            watchdog(others, progress=progress, describe=lambda: "I am rank 1", window_s=2.0,
                     notices=Notices(store, 1)),
            watchdog(alarms, describe=lambda: "I am rank 0", notices=Notices(store, 0)),
        ):  # fmt: skip
            assert alarms.get(timeout=10) == "end"
            assert "I am rank 1" in caplog.text  # before the first one ends and takes it along
            assert "the watchdog of rank 0: 0 tokens/s" in caplog.text
            assert caplog.text.count("I am rank 1") == 1
    finally:
        done.set()
    assert others.empty()


# ---- the report ----------------------------------------------------------------------------------


def test_stacks_name_threads_and_places():
    release = threading.Event()

    def waits_here():
        release.wait()

    thread = threading.Thread(target=waits_here, name="waiting-one")
    thread.start()
    try:
        text = thread_stacks()
    finally:
        release.set()
        thread.join()
    (part,) = [p for p in f"\n{text}".split("\nthread ") if p.startswith("waiting-one")]
    assert "waits_here" in part and "test_watchdog.py" in part


def test_tasks_of_a_loop_that_has_none():
    with LoopThread() as thread:
        assert "asyncio tasks (1)" in task_stacks(thread.loop)  # its own


def test_a_log_that_hangs_does_not_keep_the_report(monkeypatch, capfd):
    monkeypatch.setattr("easyrl.runtime.stacks.LOG_LIMIT_S", 0.2)
    hung = threading.Event()

    def describe():
        hung.wait(10)
        return "never"

    log_report(describe)
    hung.set()
    said = capfd.readouterr().err
    assert "most recent call first" in said and "describe" in said  # faulthandler's


# ---- ending, in a process of its own -------------------------------------------------------------

PROLOGUE = """
import ctypes, queue, sys, threading, time
from easyrl.config import WatchdogConfig
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.stopping import StopRequest
from easyrl.runtime.watchdog import STUCK, TokenProgress, Watchdog
signals = RunSignals(StopRequest(60))
signals.install()
signals.begin_training()
libc = ctypes.CDLL(None)
def in_c():  # blocks for ever, lets other threads run, and returns for no signal
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
EPILOGUE = """
watchdog = Watchdog(
    WatchdogConfig(window_s=0.5), TokenProgress(), lambda: "queue: 3 groups",
    lambda: signals.end(STUCK, 0.5), frozen_margin_s=0.5,
)
try:
    with watchdog:
        train()
finally:
    print("closed", flush=True)
"""


@pytest.mark.parametrize(
    ("train", "status", "closes", "in_log"),
    [
        ("queue.SimpleQueue().get()", 70, True, "in train"),
        ("threading.Thread(target=in_c).start(); time.sleep(30)", 70, True, "in in_c"),
        ("in_c()", 70, False, "in in_c"),
        ("ctypes.PyDLL(None).sleep(30)", 1, False, "in train"),  # nor lets other threads run
    ],
    ids=["waits", "thread-in-c", "main-thread-in-c", "frozen"],
)  # fmt: skip
def test_a_stuck_run_ends(train, status, closes, in_log):
    source = PROLOGUE + f"def train():\n    {train}\n" + EPILOGUE
    started_s = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=20
    )
    assert result.returncode == status, result.stderr
    assert time.monotonic() - started_s < 10
    assert ("closed" in result.stdout) == closes
    assert in_log in result.stderr
    if status == 70:
        assert "queue: 3 groups" in result.stderr and "thread MainThread" in result.stderr
