"""A stop that was asked for: waiters wake, the grace ends, ranks stop together. Real processes."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from easyrl.runtime.machine import free_port
from easyrl.runtime.notices import Notices
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import InterruptedRun, StopRequested


@pytest.fixture
def stop():
    given_up = []
    request = StopRequest(0.3, give_up=given_up.append)
    request.given_up = given_up
    yield request
    request.close()


# ---- within one process --------------------------------------------------------------------------


def test_who_waits_is_woken_once_by_the_first_request(stop):
    woken = queue.Queue()
    with stop.wakes(woken.put), stop.wakes(woken.put):
        assert not stop.requested
        stop.raise_if_requested()
        stop.request("first")
        assert stop.requested
        errors = [woken.get(timeout=5) for _ in range(2)]
        stop.request("second")
        assert [str(error) for error in errors] == ["first", "first"]
        assert all(isinstance(error, StopRequested) for error in errors)
    with pytest.raises(StopRequested, match="first"):
        stop.raise_if_requested()
    with stop.wakes(woken.put):  # began to wait too late, and must not wait for ever
        assert str(woken.get(timeout=5)) == "first"
    time.sleep(0.1)
    assert woken.empty()


def test_who_waits_no_more_is_left_alone(stop):
    before, now = queue.Queue(), queue.Queue()
    with stop.wakes(before.put):
        pass
    with stop.wakes(now.put):
        stop.request("please")
        now.get(timeout=5)
    assert before.empty()


def test_one_who_cannot_be_woken_does_not_keep_the_others_asleep(stop, caplog):
    def broken(error):
        raise KeyError("broken")

    woken = queue.Queue()
    with stop.wakes(broken), stop.wakes(woken.put):
        stop.request("please")
        assert woken.get(timeout=5)
    assert "could not be woken" in caplog.text and "broken" in caplog.text


def test_the_grace_begins_with_the_request_and_ends_with_the_run(stop):
    time.sleep(0.5)
    assert not stop.given_up
    stop.request("please")
    deadline = time.monotonic() + 5
    while not stop.given_up:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "trainer.grace_s" in stop.given_up[0]

    assert "no checkpoint" not in stop.given_up[0]  # it may be there: what is late is the end

    in_time = []
    other = StopRequest(20, give_up=in_time.append)
    other.request("please")
    start_s = time.monotonic()
    other.close()  # joins the thread that would give up
    assert not in_time and time.monotonic() - start_s < 15


def test_a_request_may_interrupt_every_other_operation_of_the_main_thread():
    """A handler must not wait for a lock that the interrupted code holds."""
    stop = StopRequest(60)
    interrupted = 0

    def handler(*_):
        nonlocal interrupted
        interrupted += 1
        stop.request("signal")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            with stop.wakes(lambda error: None):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.close()
    assert interrupted > 10


def test_notices_of_a_board_that_is_gone_are_silent():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("connection reset")

        def check(self, keys):
            raise RuntimeError("connection reset")

        def get(self, key):
            raise AssertionError

    board = Notices(Gone(), 1)
    assert board.read("stop") is None
    board.post("stop", "please")
    assert not Notices(None, 0).has_readers


def test_an_interrupted_run_says_which_status_it_ends_with():
    assert InterruptedRun("outage").status == 75
    assert InterruptedRun("stop", status=0).status == 0


# ---- signals, in a process of its own ------------------------------------------------------------

PROLOGUE = """
import ctypes, signal, sys, threading, time
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.stopping import StopRequest
signals = RunSignals(StopRequest(GRACE_S))
signals.install()
stop = signals.stop
def say(word): print(word, flush=True)
def wait_in_c(then):  # calls it, in a thread, when this one waits
    # unlike a sleep it is not interrupted by a signal, and it lets others run, as a collective does
    libc = ctypes.CDLL(None)
    mutex, condition = (ctypes.c_char * 64)(), (ctypes.c_char * 64)()
    libc.pthread_mutex_lock(mutex)  # given back by the wait alone
    def waits(): libc.pthread_mutex_lock(mutex); then()
    threading.Thread(target=waits, daemon=True).start()
    libc.pthread_cond_wait(condition, mutex)
"""


class Script:
    """A small program that has installed the run's signals and says what it does.

    What it says is true already: a word that is waited for is said where its signal is awaited.
    A script that reads its input goes on at ``end``.
    """

    def __init__(self, body: str, grace_s: float = 30.0) -> None:
        source = PROLOGUE.replace("GRACE_S", str(grace_s)) + body
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout.readline().strip() == word

    def end(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        """Status, what else it said, its log."""
        try:
            out, log = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
        return self.process.returncode, out, log


TRAINING = """
signals.begin_training()
woken = threading.Event()
with stop.wakes(lambda error: woken.set()):
    try:
        say("training")
        woken.wait(60)
        say("saving")
        sys.stdin.readline()
        try: stop.raise_if_requested()
        except RuntimeError as error: say(f"saved: {error}")
    finally:
        say("closed")
"""


def test_sigterm_before_training_ends_at_once():
    script = Script("try: say('loading'); time.sleep(60)\nfinally: say('closed')")
    script.wait_for("loading")
    script.process.send_signal(signal.SIGTERM)
    assert script.end()[:2] == (143, "closed\n")


def test_sigterm_lets_training_save_and_further_ones_change_nothing():
    script = Script(TRAINING)
    script.wait_for("training")
    script.process.send_signal(signal.SIGTERM)
    script.wait_for("saving")
    script.process.send_signal(signal.SIGTERM)
    status, out, log = script.end()
    assert (status, out) == (0, "saved: SIGTERM\nclosed\n")
    assert "stopping (SIGTERM)" in log


@pytest.mark.parametrize("while_saving", [False, True])
def test_ctrl_c_unwinds_at_once(while_saving):
    script = Script(TRAINING)
    script.wait_for("training")
    if while_saving:
        script.process.send_signal(signal.SIGTERM)
        script.wait_for("saving")
    script.process.send_signal(signal.SIGINT)
    assert script.end()[:2] == (130, "closed\n")


def test_the_second_signal_does_not_interrupt_the_closing():
    closing = "say('closing'); sys.stdin.readline(); say('done')"
    script = Script(f"try: say('ready'); time.sleep(60)\nfinally: {closing}")
    script.wait_for("ready")
    script.process.send_signal(signal.SIGINT)
    script.wait_for("closing")
    script.process.send_signal(signal.SIGTERM)
    assert script.end()[:2] == (130, "done\n")


def test_a_run_that_does_not_save_in_time_ends_with_all_stacks_in_the_log():
    """Stuck in C: Python's handler never runs there, the grace has to begin all the same."""
    body = """
signals.begin_training()
threading.Thread(target=time.sleep, args=(60,), name="other", daemon=True).start()
def stuck_collective():
    wait_in_c(lambda: say("training"))
stuck_collective()
"""
    script = Script(body, grace_s=0.5)
    script.wait_for("training")
    sent_s = time.monotonic()
    script.process.send_signal(signal.SIGTERM)
    status, _, log = script.end()
    assert status == 1
    assert 0.5 <= time.monotonic() - sent_s  # else it would hang for ever
    assert "trainer.grace_s" in log
    assert "thread MainThread" in log and "stuck_collective" in log and "thread other" in log


@pytest.mark.parametrize(
    ("waits", "within_s", "said"),
    [("begin(); threading.Event().wait(60)", 40, "closed\n"), ("wait_in_c(begin)", 0.5, "")],
    ids=["unwinds", "stuck-in-c"],
)
def test_a_thread_can_end_the_run(waits, within_s, said):
    script = Script(f"""
signals.begin_training()
def begin(): threading.Timer(0.2, signals.end, args=(70, {within_s})).start()
try:
    {waits}
finally:
    say("closed")
""")
    status, out, log = script.end()  # before the wait and the last resort are over
    assert (status, out) == (70, said), log


def test_a_run_that_ends_itself_does_not_wait_for_its_threads():
    """The interpreter's end would: for one in C that waits for a lost rank, for ever."""
    script = Script("""
signals.begin_training()
threading.Thread(target=threading.Event().wait).start()
threading.Timer(0.2, signals.end, args=(75, 40)).start()
try: threading.Event().wait(60)
finally: signals.finish()
""")
    assert script.end()[0] == 75  # before the last resort


def test_a_run_that_ends_itself_before_training_keeps_its_status():
    """The signal that wakes its main thread is not a SIGTERM from outside."""
    script = Script("""
import easyrl.runtime.signals
easyrl.runtime.signals.UNWIND_S = 0.1
threading.Timer(0.2, signals.end, args=(75, 40)).start()
try: threading.Event().wait(60)
finally:
    time.sleep(0.5)
    say("closed")
""")
    assert script.end()[:2] == (75, "closed\n")


def test_a_process_of_somebody_else_is_sent_ctrl_c():
    script = Script("""
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    threading.Timer(0.2, RunSignals(stop).end, args=(70, 0.3)).start()
    threading.Event().wait(60)
except KeyboardInterrupt:
    time.sleep(0.6)
    say("goes on")
""")
    assert script.end()[:2] == (0, "goes on\n")


# ---- two ranks -----------------------------------------------------------------------------------


def _stopping_rank(rank, port, ready, results):
    import torch.distributed as dist

    from easyrl.runtime.collectives import Collectives
    from easyrl.runtime.ranks import Ranks
    from easyrl.runtime.signals import RunSignals
    from easyrl.schema import PeerOutage

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    collectives = Collectives(Ranks.data_parallel(rank, 2))
    for problem in (None, "gone"):  # nobody, then an outage of one rank
        try:
            collectives.end_together(OSError(problem) if problem and rank == 1 else None)
            results.put((rank, "went on"))
        except (OSError, PeerOutage) as error:
            results.put((rank, f"{type(error).__name__}: {error}"))
    signals = RunSignals(StopRequest(30))
    signals.install()
    signals.begin_training()
    notices = Notices(collectives.open_store(), rank)
    waiting = queue.Queue()
    with signals.stop.follows_peers(notices), signals.stop.wakes(waiting.put):
        ready.put(rank)
        error = waiting.get(timeout=30)
    try:  # one of them has an outage at the same time: the stop goes first
        collectives.end_together(OSError("gone") if rank == 0 else error)
    except StopRequested as raised:
        results.put((rank, f"StopRequested: {raised}"))
    dist.destroy_process_group()


class _SlowBoard(Notices):
    """A board whose readers are inside the store most of the time."""

    def __init__(self) -> None:
        super().__init__(HashStore(), 1)
        self.reading = threading.Event()

    def read(self, kind: str) -> str | None:
        self.reading.set()
        time.sleep(0.5)
        self.reading.clear()
        return None


def test_nothing_is_inside_the_store_when_the_run_has_ended():
    """A thread that is aborts the process at the interpreter's end."""
    stop, board = StopRequest(grace_s=60), _SlowBoard()
    with stop.follows_peers(board):
        assert board.reading.wait(10)
    assert not board.reading.is_set()
    assert not board.reading.wait(1)
    stop.close()


def test_sigterm_to_one_rank_stops_both():
    context = multiprocessing.get_context("spawn")
    port, ready, results = free_port(), context.Queue(), context.Queue()
    ranks = [
        context.Process(target=_stopping_rank, args=(rank, port, ready, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert {ready.get(timeout=60) for _ in ranks} == {0, 1}
        os.kill(ranks[1].pid, signal.SIGTERM)
        sent_s = time.monotonic()
        said = [results.get(timeout=25) for _ in range(6)]
        assert time.monotonic() - sent_s < 25  # a rank that was not told waits for 30 s
        for process in ranks:
            process.join(20)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [word for rank, word in said if rank == 0] == [
        "went on",
        "PeerOutage: rank 1: gone",
        "StopRequested: rank 1: SIGTERM",
    ]
    assert [word for rank, word in said if rank == 1] == [
        "went on",
        "OSError: gone",
        "StopRequested: SIGTERM",
    ]
