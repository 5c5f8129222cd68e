"""Producer and journal together, over attempts that end in the middle of a batch."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from easyrl.completion_check import INT32_ALONE
from easyrl.dataloaders.producer.group_stream import ProducerError
from easyrl.dataloaders.producer.open_batch import OpenBatch
from easyrl.ledger.journal.codec import WithdrawalRecord
from easyrl.ledger.journal.earlier_attempts import read_earlier_attempts
from easyrl.ledger.journal.reading import journal_files, read_file
from easyrl.ledger.journal.record_file import JournalError, read_records
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.rank_coordination import SharedBatch
from easyrl.runtime.ranks import Ranks
from easyrl.schema import BatchWithdrawn, PeerOutage
from tests.dataloaders.rollout_parts import G, ScriptedGenerate, completion, generator, prompt
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    group,
    journal,
    read,
    rollouts_of,
    served,
)
from tests.waiting import wait_until

PROMPTS = [prompt(index) for index in range(4)]


def take(stream) -> dict[int, tuple[str, str]]:
    """Index → version and digest."""
    groups = iter(lambda: stream.drain_ready(50), [])
    return {g.prompt.index: (g.policy_version, g.digest) for ready in groups for g in ready}


def attempt(
    thread, directory, number, generate, prompts=PROMPTS, queue_size=64, **rules
) -> JournalledRollouts:
    made = generator(thread, generate, queue_size=queue_size)
    return rollouts_of(directory, number, made, prompts, **rules)


def asked(generate: ScriptedGenerate) -> set[int]:
    return {index for index, _ in generate.asked}


def test_each_attempt_asks_only_for_what_is_missing(tmp_path):
    first, second = ScriptedGenerate(open_indices=[0, 3]), ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, first)
        rollouts.begin(served(0), 0)
        wait_until(lambda: rollouts.num_waiting == 2)
    # killed: nothing was taken, closed or synced; another process, another loop
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 1, second, queue_size=1, num_updates=2)
        batch = rollouts.begin(served(1), 0)
        assert batch.accepted_versions == {"run:0:3", "run:1:3"}
        assert all(s.accepted_versions == {"run:0:3", "run:1:3"} for s in batch.updates)
        parts = [take(update) for update in batch.updates]
        assert [set(part) for part in parts] == [{0, 1}, {2, 3}]
        assert [update.recovered for update in batch.updates] == [{(0, 0)}, {(0, 3)}]
        taken = parts[0] | parts[1]
        rollouts.sync()
        rollouts.close()
    assert {index: version for index, (version, _) in taken.items()} == {
        0: "run:0:3", 1: "run:1:3", 2: "run:1:3", 3: "run:0:3",
    }  # fmt: skip
    assert asked(second) == {1, 2}
    journalled = {record.key[1]: (record.version, record.digest) for record in read(tmp_path)}
    assert journalled == taken  # each of them once


def test_groups_of_other_weights_are_named_to_the_batch_that_makes_them_again(tmp_path):
    with LoopThread() as thread:
        generate = ScriptedGenerate(open_indices=range(4))
        (stream,) = attempt(thread, tmp_path, 0, generate).begin(served(0), 0).updates
        stream.complete()
        rollouts = attempt(thread, tmp_path, 1, generate, num_updates=2)
        batch = rollouts.begin(served(1, digest=OTHER_WEIGHTS), 0)
        assert sorted(batch.discarded) == [(0, 0), (0, 1), (0, 2), (0, 3)]
        for stream in batch.updates:
            stream.complete()
            assert not stream.recovered
    assert len(generate.asked) == 2 * 4 * G


@pytest.mark.parametrize("in_prompt_order", [False, True])
def test_what_a_trainer_died_of_is_drawn_again(tmp_path, in_prompt_order):
    """The trainer took a token that is none of its vocabulary, in the middle of a batch."""

    async def poisoned(prompt, sample, version):
        made = completion(version)
        if (prompt.index, sample) != (2, 1):
            return made
        return replace(made, token_ids=made.token_ids - 1)

    rules = {"in_prompt_order": in_prompt_order}
    with LoopThread() as thread:
        batch = attempt(thread, tmp_path, 0, poisoned, **rules).begin(served(0), 0)
        assert set(take(batch.updates[0])) == set(range(4))
    generate = ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 1, generate, **rules)
        rollouts.journal = replace(rollouts.journal, limits=INT32_ALONE)
        batch = rollouts.begin(served(1), 0)
        taken = take(batch.updates[0])
        assert set(taken) == set(range(4)) and asked(generate) == {2}
        assert {index: version for index, (version, _) in taken.items()} == {
            index: "run:1:3" if index == 2 else "run:0:3" for index in range(4)
        }
        assert batch.discarded == {(0, 2)}


def test_the_next_batch_has_a_journal_of_its_own(tmp_path):
    generate = ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate, batch_size=2)
        rollouts.begin(served(0, v=3), 0).updates[0].complete()
        assert rollouts.has_more(2)
        rollouts.begin(served(0, v=4), 2).updates[0].complete()
        assert not rollouts.has_more(4)
        rollouts.close()
        rollouts.close()
    folders = sorted(path.parent.name for path in tmp_path.rglob("*.journal"))
    assert folders == ["batch-000003", "batch-000004"]
    assert [record.key for record in read(tmp_path)] == [(0, 0), (0, 1)]
    assert generate.asked[-1][0] in (2, 3)


def test_a_batch_that_is_given_up_keeps_what_was_finished(tmp_path):
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate)
        batch = rollouts.begin(served(0), 0)
        wait_until(lambda: batch.num_waiting == 1)
        batch.close()
        rollouts.close()
        thread.run(asyncio.sleep(0))
    assert [record.key for record in read(tmp_path)] == [(0, 0)]


# ---- refused groups ------------------------------------------------------------------------------

MANY = [prompt(index) for index in range(12)]


def rejecting(*indices: int):
    return rejecting_all(indices)


def rejecting_all(indices):
    return lambda group: "not wanted" if group.prompt.index in indices else None


def test_refused_groups_that_are_recovered_count_again(tmp_path):
    """B + R is 3 + 2: nothing beyond position 4 is asked for, and both refusals are told."""
    accept = rejecting(0, 2)
    first, second = ScriptedGenerate([0, 2, 4]), ScriptedGenerate(range(12))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, first, MANY, batch_size=3, accept=accept)
        rollouts.begin(served(0), 0)
        wait_until(lambda: rollouts.num_waiting == 1)
        wait_until(lambda: asked(first) == set(range(5)))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 1, second, MANY, batch_size=3, accept=accept)
        batch = rollouts.begin(served(1), 0)
        assert batch.membership.bound == 5
        assert set(take(batch.updates[0])) == {1, 3, 4}
        refused = sorted(batch.refused, key=lambda outcome: outcome.position)
    assert asked(second) == {1, 3}
    told = [(g.key, g.position, g.outcome, g.reason, g.recovered, g.stamped) for g in refused]
    assert told == [
        ((0, 0), 0, "rejected", "not wanted", True, ["run:0:3"]),
        ((0, 2), 2, "rejected", "not wanted", True, ["run:0:3"]),
    ]
    assert batch.updates[0].recovered == {(0, 4)}


@pytest.mark.parametrize(
    ("rejected", "expected", "recovered"),
    [((), {0, 1, 2}, set()), ((0,), {1, 2, 3}, {(0, 3)}), ((1, 2), {0, 3, 4}, {(0, 3)})],
)
def test_a_journalled_group_lies_unused_until_its_position_is_reached(
    tmp_path, rejected, expected, recovered
):
    """The group that was refused before it is lost, and comes out otherwise or the same again."""
    with LoopThread() as thread:
        generate = ScriptedGenerate([0, 3])
        rollouts = attempt(thread, tmp_path, 0, generate, MANY, batch_size=3, accept=rejecting(0))
        rollouts.begin(served(0), 0)
        wait_until(lambda: rollouts.num_waiting == 1)  # position 3
    lose_first_group(tmp_path / "batch-000003" / "attempt0-rank0.journal")
    (kept,) = read(tmp_path)
    with LoopThread() as thread:
        generate = ScriptedGenerate(range(12))
        rollouts = attempt(
            thread, tmp_path, 1, generate, MANY, batch_size=3, accept=rejecting(*rejected)
        )
        batch = rollouts.begin(served(1), 0)
        taken = take(batch.updates[0])
        assert set(taken) == expected and 3 not in asked(generate)
        assert batch.updates[0].recovered == recovered
        assert batch.membership.is_decided(3) == bool(recovered)
        assert not recovered or taken[3][1] == kept.digest


def lose_first_group(path) -> None:
    """As if another rank had written it, and its file were gone."""
    _, first, second = [place.offset for place, _ in read_records(path)]
    data = path.read_bytes()
    path.write_bytes(data[:first] + data[second:])


@pytest.mark.parametrize("in_prompt_order", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_run_is_resumed_on_another_number_of_ranks(tmp_path, before, after, in_prompt_order):
    """Every group is handed out once, on one rank; what was finished is not asked for again."""
    rules = {"batch_size": 6, "accept": rejecting(1, 6), "in_prompt_order": in_prompt_order}
    with LoopThread() as thread:
        first = ScriptedGenerate([0, 1, 5, 6])
        run = RankedRun(before)
        for rollouts in run.rollouts(thread, tmp_path, 0, first, **rules):
            rollouts.begin(served(0), 0)
        wait_until(lambda: {record.key[1] for record in read(tmp_path)} == {0, 1, 5, 6})
    with LoopThread() as thread:
        second = ScriptedGenerate(range(12))
        run = RankedRun(after)
        batches = [
            rollouts.begin(served(1), 0)
            for rollouts in run.rollouts(thread, tmp_path, 1, second, **rules)
        ]
        shares = together([lambda b=batch: take(b.updates[0]) for batch in batches])
        indices = [index for share in shares for index in share]
        assert sorted(indices) == [0, 2, 3, 4, 5, 7]
        refused = [outcome.key for batch in batches for outcome in batch.refused]
        assert sorted(refused) == [(0, 1), (0, 6)]
        recovered = [key for batch in batches for key in batch.updates[0].recovered]
        assert sorted(recovered) == [(0, 0), (0, 5)]
        assert all(batch.membership.ended_by == "accepted" for batch in batches)
    assert asked(second) == {2, 3, 4, 7} and len(second.asked) == 4 * G
    if in_prompt_order:
        assert all(index % after == rank for rank, share in enumerate(shares) for index in share)


# ---- withdrawal ----------------------------------------------------------------------------------

GOOD, BAD = "http://good:8000", "http://bad:8000"


class ProvedGenerate(ScriptedGenerate):
    """Odd prompts are answered by one endpoint, even ones by another; each at its last proof."""

    def __init__(self, open_indices=()):
        super().__init__(open_indices)
        self.proofs = {GOOD: 1, BAD: 1}

    async def __call__(self, prompt, sample, version):
        made = await super().__call__(prompt, sample, version)
        url = BAD if prompt.index % 2 else GOOD
        return replace(made, endpoint=url, proof=self.proofs[url])


def withdraw(thread, rollouts: JournalledRollouts, proof: int) -> None:
    async def on_loop() -> None:
        rollouts.withdraw(BAD, proof)

    thread.run(on_loop())


def test_a_batch_begins_again_without_what_was_withdrawn(tmp_path):
    """Groups of the endpoint since its proof are generated again, also the open one; others kept.

    A rejection that is withdrawn no longer counts in R.
    """
    generate, rejected = ProvedGenerate([0, 1]), {1, 3}
    with LoopThread() as thread:
        rollouts = attempt(
            thread, tmp_path, 0, generate, MANY, batch_size=4, accept=rejecting_all(rejected)
        )
        batch = rollouts.begin(served(0), 0)
        wait_until(lambda: len(read(tmp_path)) == 2)
        generate.proofs[BAD] = 2
        generate.release(thread, 3)
        wait_until(lambda: len(read(tmp_path)) == 3)
        wait_until(lambda: asked(generate) == set(range(6)))  # B + R
        assert [g.prompt.index for g in batch.updates[0].drain_ready(1)] == [0]
        withdraw(thread, rollouts, 2)
        for _ in range(2):
            with pytest.raises(BatchWithdrawn, match=f"{BAD} failed its proof.* 2 are withdrawn"):
                batch.updates[0].drain_ready(1)
        assert "1 of rank 0" in batch.withdrawn
        batch.close()

        rollouts.share_withdrawals()
        generate.proofs[BAD], generate.asked[:] = 3, []
        generate.open = set(range(12))
        rejected.discard(3)
        again = rollouts.begin(served(0), 0)
        assert again.withdrawn is None and sorted(again.updates[0].recovered) == []
        taken = take(again.updates[0])
        assert set(taken) == {0, 2, 3, 4}
        assert [(g.key, g.recovered) for g in again.refused] == [((0, 1), False)]
        assert asked(generate) == {2, 3, 4}  # not 0, nor 1, which it made before
        rollouts.close()
    # and the same after a resume: of prompt 3 the second group
    with LoopThread() as thread:
        later = ScriptedGenerate()
        resumed = attempt(
            thread, tmp_path, 1, later, MANY, batch_size=4, accept=rejecting_all(rejected)
        ).begin(served(1), 0)
        assert {i: digest for i, (_, digest) in take(resumed.updates[0]).items()} == {
            i: digest for i, (_, digest) in taken.items()
        }
        assert not later.asked
        assert [(g.key, g.recovered) for g in resumed.refused] == [((0, 1), True)]


def test_a_failed_proof_with_nothing_journalled_begins_the_batch_again(tmp_path):
    """An open group may have responses of the endpoint that nobody has written down yet."""
    with LoopThread() as thread:
        generate = ProvedGenerate()
        rollouts = attempt(thread, tmp_path, 0, generate)
        batch = rollouts.begin(served(0), 0)
        withdraw(thread, rollouts, 1)
        with pytest.raises(BatchWithdrawn, match="0 of rank 0, not counting open ones"):
            batch.updates[0].drain_ready(1)


def test_what_no_batch_has_begun_again_without_stays_in_doubt(tmp_path):
    """Behind the last look at an open batch: whoever moves the weights on has to ask."""
    generate = ProvedGenerate()
    generate.open = set(range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate)
        batch = rollouts.begin(served(0), 0)
        assert set(take(batch.updates[0])) == set(range(4))
        withdraw(thread, rollouts, 1)
        rollouts.share_withdrawals()
        withdraw(thread, rollouts, 2)  # the run stops here, and resumes from before the batch
        assert rollouts.end_batch() == {BAD: 2}
        assert rollouts.end_batch() == {}
    with LoopThread() as thread:
        later = ScriptedGenerate(range(4))
        resumed = attempt(thread, tmp_path, 1, later).begin(served(1), 0)
        assert set(take(resumed.updates[0])) == set(range(4))
        assert asked(later) == {1, 3}  # of the endpoint


def test_what_fails_once_the_weights_have_moved_is_of_the_next_batch(tmp_path):
    """Before it begins, too: another rank may have begun it and asked the endpoint already."""
    generate = ProvedGenerate()
    generate.open = set(range(4))
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, generate, MANY[:8], batch_size=4)
        assert set(take(rollouts.begin(served(0), 0).updates[0])) == set(range(4))
        assert rollouts.end_batch() == {}
        withdraw(thread, rollouts, 2)
        assert withdrawals(tmp_path / "batch-000003") == []  # certified, and sound
        opened = rollouts.begin(served(0, v=4), 4)
        with pytest.raises(BatchWithdrawn, match=f"{BAD} failed its proof while the batch began"):
            opened.updates[0].drain_ready(1)
        opened.close()
        rollouts.share_withdrawals()
        assert withdrawals(tmp_path / "batch-000004") == [(BAD, 2, 0)]
        generate.open = set(range(8))
        assert set(take(rollouts.begin(served(0, v=4), 4).updates[0])) == set(range(4, 8))
        assert rollouts.end_batch() == {}


def test_ranks_agree_on_what_was_withdrawn_while_the_batch_began_again(tmp_path):
    """One rank's number of restarts is behind the others': none takes back what came after."""
    ranks = [journal(tmp_path, 0, rank).open_batch(served(0)) for rank in range(2)]
    ranks[0].withdraw(BAD, 1)  # between what it told the others and its new beginning
    for _ in range(2):
        for rank in ranks:
            rank.begin_again()
        for rank, proof in zip(ranks, (1, 0), strict=True):
            rank.withdraw(BAD, proof)
    for index, rank in enumerate(ranks):
        rank.begin_again()
        rank.add(group(index, "run:0:3", made_by=((BAD, 2),)))
        rank.close()
    earlier = read_earlier_attempts(tmp_path / "batch-000003", served(1), "", 0)
    assert len(earlier.finished) == 2 and not earlier.made_otherwise


def test_a_rank_that_was_told_of_an_earlier_withdrawal_only_was_not_told(tmp_path):
    ranks = [journal(tmp_path, 0, rank).open_batch(served(0)) for rank in range(2)]
    for rank in ranks:
        rank.withdraw(BAD, 1)
        rank.begin_again()
    for index, rank in enumerate(ranks):
        rank.add(group(index, "run:0:3", made_by=((BAD, 2),)))
    ranks[0].withdraw(BAD, 2)  # and the run was killed
    for rank in ranks:
        rank.close()
    earlier = read_earlier_attempts(tmp_path / "batch-000003", served(1), "", 0)
    assert not earlier.finished and len(earlier.made_otherwise) == 2


def withdraw_endpoint(rollouts: JournalledRollouts) -> None:
    rollouts.withdraw_endpoints({BAD: "differs by 4.2 nats"})


def test_all_that_an_endpoint_made_is_taken_back_also_of_earlier_attempts(tmp_path):
    """Whatever proof it had passed since: it proved, and its log-probabilities are others."""
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, ProvedGenerate(range(4)))
        rollouts.begin(served(0), 0)
        wait_until(lambda: len(read(tmp_path)) == 4)  # and killed
    with LoopThread() as thread:
        told, generate = [], ProvedGenerate(range(4))
        rollouts = attempt(thread, tmp_path, 1, generate)
        rollouts.on_withdrawal = told.append
        batch = rollouts.begin(served(1), 0)
        assert batch.updates[0].recovered == {(0, index) for index in range(4)}
        withdraw_endpoint(rollouts)
        with pytest.raises(BatchWithdrawn, match=f"{BAD} differs by 4.2 nats: .*2 of rank 0"):
            batch.updates[0].complete()
        batch.close()
        rollouts.share_withdrawals()
        assert told == [{BAD: "differs by 4.2 nats"}]
        again = rollouts.begin(served(1), 0)
        assert again.withdrawn is None and again.discarded == {(0, 1), (0, 3)}
        assert set(take(again.updates[0])) == set(range(4))
        assert asked(generate) == {1, 3}
        rollouts.close()
    left = read_earlier_attempts(tmp_path / "batch-000003", served(2), "", 0)
    assert {key: stored.place.path.name[:8] for key, stored in left.finished.items()} == {
        (0, 0): "attempt0", (0, 1): "attempt1", (0, 2): "attempt0", (0, 3): "attempt1",
    }  # fmt: skip


def test_all_ranks_are_told_why_an_endpoint_is_not_used_any_more(tmp_path):
    generate = ProvedGenerate(range(3))  # the batch is not complete
    with LoopThread() as thread:
        told = [[], []]
        run = RankedRun(2)
        ranks = run.rollouts(thread, tmp_path, 0, generate, batch_size=4, in_prompt_order=False)
        for rollouts, mine in zip(ranks, told, strict=True):
            rollouts.on_withdrawal = mine.append
        batches = [rollouts.begin(served(0), 0) for rollouts in ranks]
        wait_until(lambda: len(read(tmp_path)) == 3)
        withdraw_endpoint(ranks[1])
        generate.open = set(range(12))
        batches = begin_again(ranks, batches, "differs by 4.2 nats")
        shares = together([lambda b=batch: take(b.updates[0]) for batch in batches])
        assert sorted(index for share in shares for index in share) == [0, 1, 2, 3]
    assert told == [[{BAD: "differs by 4.2 nats"}]] * 2
    assert sorted(record.key[1] for record in read(tmp_path)) == [0, 1, 1, 2, 3]


def withdrawals(folder: Path) -> list[tuple[str, int, int]]:
    """Endpoint, proof and number of restarts of those in a batch's journals."""
    return [
        (record.endpoint, record.proof, record.restart)
        for file in journal_files(folder)
        for _, record in read_file(file, int(folder.name[-6:]))[1]
        if isinstance(record, WithdrawalRecord)
    ]


def test_no_batch_no_withdrawal(tmp_path):
    with LoopThread() as thread:
        rollouts = attempt(thread, tmp_path, 0, ScriptedGenerate(range(4)))
        withdraw(thread, rollouts, 0)
        rollouts.end_batch()  # before the first weights
        rollouts.begin(served(0), 0).updates[0].complete()
        rollouts.close()
        withdraw(thread, rollouts, 0)
    assert len(read(tmp_path)) == 4
    with LoopThread() as thread:
        batch = attempt(thread, tmp_path, 1, ScriptedGenerate()).begin(served(1), 0)
        assert set(take(batch.updates[0])) == set(range(4))


def test_a_rank_whose_producer_has_failed_does_not_leave_the_others_waiting(tmp_path):
    """Rank 0 has all of its own groups, and waits for a position of rank 1 to be decided."""

    async def fails(prompt, sample, version):
        if prompt.index == 3:
            raise RuntimeError("no endpoint is up")
        return completion(version)

    with LoopThread() as thread:
        ranks = RankedRun(2).rollouts(
            thread, tmp_path, 0, fails, batch_size=4, in_prompt_order=True
        )
        first, second = [rollouts.begin(served(0), 0).updates[0] for rollouts in ranks]
        with pytest.raises(ProducerError, match="no endpoint is up"):
            second.complete()
        with pytest.raises(PeerOutage, match="rank 1: no endpoint is up"):
            first.complete()


@pytest.mark.parametrize("in_prompt_order", [False, True])
def test_all_ranks_begin_again_with_the_same_membership(tmp_path, in_prompt_order):
    """Rank 0 finds the endpoint out; rank 1 withdraws all that it has made, by whatever proof."""
    generate = ProvedGenerate(range(4))
    rules = {"batch_size": 4, "accept": rejecting(2, 3), "in_prompt_order": in_prompt_order}
    with LoopThread() as thread:
        run = RankedRun(2)
        ranks = run.rollouts(thread, tmp_path, 0, generate, **rules)
        batches = [rollouts.begin(served(0), 0) for rollouts in ranks]
        wait_until(lambda: {record.key[1] for record in read(tmp_path)} == {0, 1, 2, 3})
        wait_until(lambda: asked(generate) == set(range(6)))
        withdraw(thread, ranks[0], 2)  # nothing of rank 0's was made since
        generate.asked[:] = []
        generate.proofs[BAD] = 3
        generate.open = set(range(12))
        batches = begin_again(ranks, batches)
        shares = together([lambda b=batch: take(b.updates[0]) for batch in batches])
        assert sorted(index for share in shares for index in share) == [0, 1, 4, 5]
        refused = [outcome.key for batch in batches for outcome in batch.refused]
        assert sorted(refused) == [(0, 2), (0, 3)]
        if in_prompt_order:  # all odd prompts were rank 1's
            assert asked(generate) == {1, 3, 4, 5}
        assert {4, 5} <= asked(generate) <= {1, 3, 4, 5}


def test_what_a_rank_has_kept_beyond_the_bound_is_drawn_by_that_rank(tmp_path):
    """Another one would generate it again, and both would train it if the batch began once more.

    Rank 1 journals 1, rejected, and 2 in its place; 1 is withdrawn, so that 2 is not drawn any
    more; then a group of rank 0 is rejected, which has room for another one.
    """
    generates, rejected = [ProvedGenerate(), ProvedGenerate([1, 2])], {1}
    rules = {"batch_size": 2, "accept": rejecting_all(rejected), "in_prompt_order": False}
    with LoopThread() as thread:
        run = RankedRun(2)
        ranks = [
            run.rollouts(thread, tmp_path, 0, generate, **rules)[rank]
            for rank, generate in enumerate(generates)
        ]
        batches = []
        for rollouts, generate in zip(ranks, generates, strict=True):
            batches.append(rollouts.begin(served(0), 0))
            wait_until(lambda generate=generate: generate.asked)
        wait_until(lambda: [record.key[1] for record in read(tmp_path)] == [1, 2])
        withdraw(thread, ranks[0], 2)
        for generate in generates:
            generate.asked[:], generate.open = [], set()
            generate.proofs[BAD] = 3
            generate.gates.clear()
        batches = begin_again(ranks, batches)
        wait_until(lambda: all(len(generate.asked) == G for generate in generates))
        [(mine, *_), (other, *_)] = [generate.asked[0] for generate in generates]
        rejected.clear()
        rejected.add(mine)
        generates[0].release(thread, mine)
        wait_until(lambda: batches[1].num_waiting == 1)
        generates[1].release(thread, other)
        assert together([lambda b=batch: set(take(b.updates[0])) for batch in batches]) == [
            set(),
            {2, other},
        ]
        assert [asked(generate) for generate in generates] == [{mine}, {other}]
    assert [record.rank for record in read(tmp_path) if record.key == (0, 2)] == [1]


# ---- several ranks in one process ----------------------------------------------------------------


def begin_again(
    ranks: list[JournalledRollouts], batches: list[OpenBatch], problem: str = "failed its proof"
) -> list[OpenBatch]:
    """All ranks, once they have heard that a group was withdrawn."""

    def one(rollouts: JournalledRollouts, batch: OpenBatch) -> OpenBatch:
        with pytest.raises(BatchWithdrawn, match=problem):
            batch.updates[0].complete()
        batch.close()
        rollouts.share_withdrawals()
        return rollouts.begin(served(0), 0)

    wait_until(lambda: all(batch.withdrawn is not None for batch in batches))
    pairs = zip(ranks, batches, strict=True)
    return together([lambda pair=pair: one(*pair) for pair in pairs])


class FakeStore:
    """``TCPStore`` in memory."""

    def __init__(self):
        self._values = {}
        self._lock = threading.Lock()

    def add(self, key, amount):
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount
            return self._values[key]

    def set(self, key, value):
        self._values[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys):
        return all(key in self._values for key in keys)

    def get(self, key):
        return self._values[key]

    def delete_key(self, key):
        return self._values.pop(key, None) is not None


class RankedRun:
    """Ranks that share a store, and gather where each of them is called on a thread of its own."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.store = FakeStore()
        self.slots = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)

    def rollouts(self, thread, directory, number, generate, **rules) -> list[JournalledRollouts]:
        return [
            rollouts_of(
                directory,
                number,
                generator(thread, generate, in_prompt_order=rules["in_prompt_order"]),
                MANY,
                ranks=Ranks.data_parallel(rank, self.num_ranks),
                coordination=OneOfRanks(self, rank),
                **rules,
            )
            for rank in range(self.num_ranks)
        ]


class OneOfRanks:
    """``Coordination`` of one rank."""

    def __init__(self, run: RankedRun, rank: int) -> None:
        self._run = run
        self._rank = rank

    def open_batch(self, name: str) -> SharedBatch:
        return SharedBatch(self._run.store, name, self._rank, self._run.num_ranks)

    def gather(self, value):
        self._run.slots[self._rank] = value
        self._run.barrier.wait()
        gathered = list(self._run.slots)
        self._run.barrier.wait()
        return gathered


def together(calls):
    """Each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=40) for future in [pool.submit(call) for call in calls]]


# ---- the end of a batch --------------------------------------------------------------------------


def trained(thread, directory, fsync: str) -> JournalledRollouts:
    """With a batch whose groups are all taken, behind the producer's own sync; and ended."""
    rollouts = attempt(thread, directory, 0, ScriptedGenerate(range(4)))
    rollouts.journal = replace(rollouts.journal, fsync=fsync)
    batch = rollouts.begin(served(0), 0)
    batch.producing.result(10)
    assert set(take(batch.updates[0])) == set(range(4))  # each drain is a record
    rollouts.end_batch()  # the weights move
    return rollouts


@pytest.mark.parametrize(("fsync", "times"), [("group", 1), ("batch", 1), ("never", 0)])
def test_a_batch_whose_weights_have_moved_on_is_synced_before_it_is_certified(
    fsync, times, tmp_path, monkeypatch
):
    """Also what was written behind its last group: drains, withdrawals."""
    synced = []
    with LoopThread() as thread:
        rollouts = trained(thread, tmp_path, fsync)
        monkeypatch.setattr(
            "easyrl.ledger.journal.record_file.fsync", lambda file, path: synced.append(path)
        )
        rollouts.sync()
        rollouts.sync()
        (file,) = journal_files(tmp_path / "batch-000003")
        assert synced == [file.path] * times
        rollouts.close()


def test_a_journal_that_cannot_be_synced_keeps_its_batch_from_being_certified(
    tmp_path, monkeypatch
):
    def full(file, path):
        raise OSError(28, "No space left on device")

    with LoopThread() as thread:
        rollouts = trained(thread, tmp_path, "batch")
        monkeypatch.setattr("easyrl.ledger.journal.record_file.fsync", full)
        with pytest.raises(JournalError, match="make room"):
            rollouts.sync()
        rollouts.close()
