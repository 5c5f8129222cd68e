"""What ends a batch on one rank reaches the other's trainer, between real processes over gloo."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from easyrl.dataloaders.producer.group_stream import ProducerError
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_coordination import RankCoordination
from easyrl.runtime.ranks import Ranks
from easyrl.schema import BatchWithdrawn, PeerOutage
from tests.dataloaders.rollout_parts import completion, generator, prompt
from tests.easyrl.ledger.journal_groups import read, rollouts_of, served
from tests.easyrl.ledger.test_journalled_rollouts import (
    BAD,
    ProvedGenerate,
    asked,
    take,
    withdraw,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.runs


def rollouts_of_rank(
    collectives: Collectives, folder: Path, thread: LoopThread, generate: Callable[..., Any]
) -> JournalledRollouts:
    """Of four prompts; position p is drawn by rank p mod 2."""
    return rollouts_of(
        folder,
        0,
        generator(thread, generate, in_prompt_order=True),
        [prompt(index) for index in range(4)],
        ranks=collectives.ranks,
        coordination=RankCoordination(collectives),
        in_prompt_order=True,
    )


def _withdrawal(collectives: Collectives, folder: Path, thread: LoopThread) -> list[Any]:
    """Rank 0 finds an endpoint out, which has made all groups of rank 1 and none of its own."""
    generate, set_aside = ProvedGenerate([0, 1, 3]), []
    rollouts = rollouts_of_rank(collectives, folder, thread, generate)
    rollouts.on_withdrawal = set_aside.extend
    batch = rollouts.begin(served(0), 0)
    wait_until(lambda: len(read(folder)) == 3)
    collectives.all_gather(None)  # both have seen it
    if collectives.ranks.rank == 0:
        withdraw(thread, rollouts, 1)
    with pytest.raises(BatchWithdrawn) as raised:  # rank 1 waits for a position of rank 0
        batch.updates[0].complete()
    batch.close()
    rollouts.share_withdrawals()
    generate.asked.clear()
    generate.open, generate.proofs[BAD] = set(range(4)), 2
    taken = take(rollouts.begin(served(0), 0).updates[0])
    rollouts.close()
    return [str(raised.value), set_aside, sorted(taken), sorted(asked(generate))]


def _outage(collectives: Collectives, folder: Path, thread: LoopThread) -> str:
    """Rank 0 has both of its groups, and waits for a position of rank 1."""

    async def generate(prompt, sample, version):
        if prompt.index == 3:
            raise RuntimeError("no endpoint is up")
        return completion(version)

    batch = rollouts_of_rank(collectives, folder, thread, generate).begin(served(0), 0)
    with pytest.raises((PeerOutage, ProducerError)) as raised:
        batch.updates[0].complete()
    return f"{raised.typename}: {raised.value}"


def _rank(rank: int, port: int, folder: Path, results: Any) -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # a rank that is not told waits for ever
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    collectives = Collectives(Ranks.data_parallel(rank, 2))
    with LoopThread() as thread:
        results[rank] = [
            scenario(collectives, folder / scenario.__name__, thread)
            for scenario in (_withdrawal, _outage)
        ]
        collectives.all_gather(None)  # the store is rank 0's: it ends last
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What both ranks saw."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.list([None, None])
        folder = tmp_path_factory.mktemp("journal")
        multiprocessing.spawn(_rank, args=(free_port(), folder, results), nprocs=2)
        return list(results)


def test_a_withdrawal_on_one_rank_is_made_on_both(results: list[Any]) -> None:
    for rank, (reason, set_aside, taken, asked_again) in enumerate(seen[0] for seen in results):
        assert reason.startswith(f"{BAD} failed its proof") and "0 of rank 0" in reason
        assert set_aside == [BAD]
        assert taken == [rank, rank + 2]
        assert asked_again == [[2], [1, 3]][rank]  # the open one; all that the endpoint had made


def test_a_rank_without_endpoints_does_not_leave_the_other_waiting(results: list[Any]) -> None:
    assert [outage for _, outage in results] == [
        "PeerOutage: rank 1: no endpoint is up",
        "ProducerError: rollout production failed: no endpoint is up",
    ]
