"""What ranks tell each other, between real processes over gloo."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from easyrl.inference_client.errors import Outage
from easyrl.runtime.collectives import Collectives, PeerFailed
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_coordination import RankCoordination
from easyrl.runtime.ranks import Ranks
from easyrl.schema import BatchWithdrawn, PeerOutage, RewardError, StopRequested


def _rank(rank: int, port: int, results) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    collectives = Collectives(Ranks.data_parallel(rank, 2))
    results[rank] = {name: scenario(rank, collectives) for name, scenario in SCENARIOS.items()}
    dist.destroy_process_group()


def _exchange(rank, collectives):
    return collectives.all_gather({"rank": rank, "text": "ä" * (rank * 100)})


def _from_rank_zero(rank, collectives):
    return collectives.broadcast({"rank": rank})


def _uneven(rank, collectives):
    work = iter(range(1 + 4 * rank))
    return list(collectives.in_lockstep(work, lambda: "dummy"))


def _failing(rank, collectives):
    def work():
        yield 1
        if rank == 1:
            raise ValueError("no more")
        yield 2
        yield 3

    seen = []
    try:
        for item in collectives.in_lockstep(work(), lambda: "dummy"):
            seen.append(item)
    except (ValueError, PeerFailed) as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen


def _ending(mine: tuple[Exception | None, Exception | None]):
    """What each rank raises, whose own errors are these."""

    def scenario(rank, collectives):
        try:
            collectives.end_together(mine[rank])
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return scenario


def _notes(rank, collectives):
    """A batch that both ranks fill: claims, decisions, and what is left of them."""
    ranks = RankCoordination(collectives)
    seen = []
    for number in range(4):
        batch = ranks.open_batch(f"run:0:{number}/0")
        claims = [batch.claim() for _ in range(5)]
        for claim in claims:
            batch.publish(claim, claim % 2 == rank)
        collectives.all_gather(None)  # both have published
        seen.append((claims, list(batch.news()), list(batch.news())))
        collectives.all_gather(None)  # both have read
    return seen, ranks.gather([(rank, True)]), ranks._store.num_keys() if rank == 0 else None


SCENARIOS = {
    "no error": _ending((None, None)),
    "withdrawal": _ending((None, BatchWithdrawn("http://a failed its proof"))),
    "outage and withdrawal": _ending((BatchWithdrawn("http://a"), Outage("all are down"))),
    "stop and withdrawal": _ending((BatchWithdrawn("http://a"), StopRequested("SIGTERM"))),
    "two withdrawals": _ending((BatchWithdrawn("http://a"), BatchWithdrawn("http://b"))),
    "stop and outage": _ending((Outage("all are down"), StopRequested("SIGTERM"))),
    "reward": _ending((None, RewardError("rewards[0]: fails"))),
    "reward and the outage that others take it for": _ending(
        (PeerOutage("rank 1: rewards[0]"), RewardError("rewards[0]"))
    ),
    "notes": _notes,
    "exchange": _exchange,
    "from_rank_zero": _from_rank_zero,
    "uneven": _uneven,
    "failing": _failing,
}


@pytest.fixture(scope="module")
def results() -> list:
    """What both ranks saw in all scenarios, one after the other."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.list([None, None])
        multiprocessing.spawn(_rank, args=(free_port(), results), nprocs=2)
        return list(results)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("exchange", [[{"rank": 0, "text": ""}, {"rank": 1, "text": "ä" * 100}]] * 2),
        ("from_rank_zero", [{"rank": 0}] * 2),
        ("uneven", [[0, "dummy", "dummy", "dummy", "dummy"], [0, 1, 2, 3, 4]]),
        ("failing", [[1, "PeerFailed: rank 1 failed"], [1, "ValueError: no more"]]),
    ],
)
def test_two_ranks(scenario, expected, results):
    assert [seen[scenario] for seen in results] == expected


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("no error", [None, None]),
        (
            "withdrawal",
            [
                "BatchWithdrawn: rank 1: http://a failed its proof",
                "BatchWithdrawn: http://a failed its proof",
            ],
        ),
        (
            "outage and withdrawal",
            ["PeerOutage: rank 1: all are down", "Outage: all are down"],
        ),
        ("stop and withdrawal", ["StopRequested: rank 1: SIGTERM", "StopRequested: SIGTERM"]),
        ("two withdrawals", ["BatchWithdrawn: http://a", "BatchWithdrawn: http://b"]),
        ("stop and outage", ["StopRequested: rank 1: SIGTERM", "StopRequested: SIGTERM"]),
        (
            "reward",
            ["RewardError: rank 1: rewards[0]: fails", "RewardError: rewards[0]: fails"],
        ),
        (
            "reward and the outage that others take it for",
            ["RewardError: rank 1: rewards[0]", "RewardError: rewards[0]"],
        ),
    ],
)
def test_ranks_end_together_for_what_goes_first(scenario, expected, results):
    assert [seen[scenario] for seen in results] == expected


def test_ranks_share_the_decisions_of_a_batch(results):
    (first, gathered, num_keys), (second, also_gathered, _) = (seen["notes"] for seen in results)
    for (mine, news, again), (theirs, their_news, _) in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(10))  # each number is claimed once
        assert news == [(claim, claim % 2 == 1, None, None) for claim in theirs] and again == []
        assert their_news == [(claim, claim % 2 == 0, None, None) for claim in mine]
    assert gathered == also_gathered == [[[0, True]], [[1, True]]]
    # of the last two batches: ten decisions each; of all: the two counters
    assert num_keys <= 2 * 10 + 4 * 2 + 1


def test_one_rank_needs_no_process_group():
    collectives = Collectives(Ranks.data_parallel(0, 1))
    assert collectives.all_gather("x") == ["x"]
    assert list(collectives.in_lockstep(iter([1, 2]), lambda: 0)) == [1, 2]


def _wait_in_vain(rank: int, port: int, started) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    collectives = Collectives(Ranks.data_parallel(rank, 2))
    if rank == 1:
        threading.Event().wait(60)  # never joins; is killed
        return

    def stop(*_: object) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, stop)
    threading.Timer(0.5, started.set).start()  # by then it waits
    collectives.all_gather("alone")


def test_a_signal_ends_a_rank_that_waits_for_another():
    context = multiprocessing.get_context("spawn")
    started, port = context.Event(), free_port()
    ranks = [context.Process(target=_wait_in_vain, args=(r, port, started)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        assert started.wait(60)
        sent_s = time.monotonic()
        os.kill(ranks[0].pid, signal.SIGTERM)
        ranks[0].join(5)
        assert ranks[0].exitcode == 7 and time.monotonic() - sent_s < 5
    finally:
        for process in ranks:
            process.kill()
            process.join()
