"""A rank that falls silent ends the run on all ranks; one that leaves, or is slow, does not."""

import queue
import threading
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from easyrl.runtime.heartbeats import LEFT, LONGEST_GAP_S, Heartbeats, Silence
from tests.waiting import wait_until

BEAT_S, TIMEOUT_S = 0.005, 1.0


class Connection:
    """A rank's way to the store; calls on one that was cut do not return, as in torch."""

    def __init__(self, store):
        self.store = store
        self.cut, self.mended = threading.Event(), threading.Event()
        self.is_gone = False

    def __getattr__(self, name):
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        if self.cut.is_set():
            self.mended.wait()
        return getattr(self.store, name)


class Cluster:
    """Heartbeats of three ranks in one process."""

    def __init__(self, opened, timeout_s=TIMEOUT_S):
        self.store, self.ended = HashStore(), queue.Queue()
        self.ways = [Connection(self.store) for _ in range(3)]
        self.beats = []
        for rank, way in enumerate(self.ways):
            opened.callback(way.mended.set)
            end = lambda reason, rank=rank: self.ended.put((rank, reason))  # noqa: E731
            beat = Heartbeats(way, rank, 3, timeout_s, end, beat_s=BEAT_S)
            self.beats.append(opened.enter_context(beat))

    def wait_for_beats(self, rank, more):
        key = f"beat/{rank}"
        wait_until(lambda: self.store.check([key]))
        wanted = int(self.store.get(key)) + more
        wait_until(lambda: int(self.store.get(key)) >= wanted)

    def reasons(self, count):
        return dict(self.ended.get(timeout=10) for _ in range(count))


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr("easyrl.runtime.heartbeats.PEERS_S", 0.05)
    monkeypatch.setattr("easyrl.runtime.heartbeats.CLOSE_S", 0.05)
    with ExitStack() as opened:
        yield Cluster(opened)


def test_ranks_that_are_all_there_are_left_alone(cluster):
    cluster.wait_for_beats(1, round(1.5 * TIMEOUT_S / BEAT_S))  # sooner than that none could end
    assert cluster.ended.empty()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_is_cut_off_ends_the_run_on_all_ranks(cluster, lost):
    for rank in range(3):
        cluster.wait_for_beats(rank, 3)
    cluster.ways[lost].cut.set()
    reasons = cluster.reasons(3)
    assert f"no sign of life of rank {lost} " in reasons[0]
    assert reasons[3 - lost] == reasons[0]  # the one in between is told by rank 0
    assert "no sign of life of rank 0 " in reasons[lost]
    assert "watchdog.peer_timeout_s" in reasons[0]


def test_a_rank_that_leaves_is_not_missed(cluster):
    cluster.wait_for_beats(2, 3)
    cluster.beats[2].__exit__()
    assert cluster.store.get("beat/2") == LEFT
    cluster.wait_for_beats(1, round(1.5 * TIMEOUT_S / BEAT_S))
    assert cluster.ended.empty()


def test_ranks_end_by_themselves_after_rank_0_has_ended(cluster):
    """Their next exchange with it says more than its silence would."""
    cluster.wait_for_beats(1, 3)
    for way in cluster.ways[1:]:
        way.is_gone = True
    threads = [thread for beat in cluster.beats[1:] for thread in beat._threads]
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert all("rank 0" not in reason for reason in dict(cluster.ended.queue).values())


def test_no_timeout_is_no_heartbeat():
    with ExitStack() as opened:
        cluster = Cluster(opened, timeout_s=0)
        assert not any(thread.is_alive() for beat in cluster.beats for thread in beat._threads)


def test_a_process_that_was_stopped_does_not_count_that_time():
    silence = Silence(range(2))
    silence.pass_by(86_400.0)
    assert not silence.longer_than(LONGEST_GAP_S)
    silence.hear(0, b"1")
    silence.pass_by(5.0)
    assert silence.longer_than(LONGEST_GAP_S) == [1]
    silence.hear(0, b"1")  # the same count is no sign of life
    silence.pass_by(6.0)
    assert silence.longer_than(LONGEST_GAP_S) == [0, 1]
