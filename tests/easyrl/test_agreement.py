"""What ranks tell each other, between real processes over gloo."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from easyrl.agreement import Agreement, PeerFailed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, port: int, scenario: str, results) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    agreement = Agreement(rank, 2)
    results[rank] = SCENARIOS[scenario](rank, agreement)
    dist.destroy_process_group()


def _exchange(rank, agreement):
    return agreement.exchange({"rank": rank, "text": "ä" * (rank * 100)})


def _from_rank_zero(rank, agreement):
    return agreement.from_rank_zero({"rank": rank})


def _uneven(rank, agreement):
    work = iter(range(1 + 4 * rank))
    return list(agreement.in_lockstep(work, lambda: "dummy"))


def _failing(rank, agreement):
    def work():
        yield 1
        if rank == 1:
            raise ValueError("no more")
        yield 2
        yield 3

    seen = []
    try:
        for item in agreement.in_lockstep(work(), lambda: "dummy"):
            seen.append(item)
    except (ValueError, PeerFailed) as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen


SCENARIOS = {
    "exchange": _exchange,
    "from_rank_zero": _from_rank_zero,
    "uneven": _uneven,
    "failing": _failing,
}


def run_two_ranks(scenario: str) -> list:
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.list([None, None])
        multiprocessing.spawn(_rank, args=(free_port(), scenario, results), nprocs=2)
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
def test_two_ranks(scenario, expected):
    assert run_two_ranks(scenario) == expected


def test_one_rank_needs_no_process_group():
    agreement = Agreement(0, 1)
    assert agreement.exchange("x") == ["x"]
    assert list(agreement.in_lockstep(iter([1, 2]), lambda: 0)) == [1, 2]
