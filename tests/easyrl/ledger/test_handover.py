"""Finished groups that go to the rank with least to train, and what a kill leaves of that."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from easyrl.dataloaders.producer.group_stream import GroupStream, ProducerError
from easyrl.ledger.journal import batch as batch_module
from easyrl.ledger.journal.codec import DrainRecord, HandedGroup, HandoverRecord, decode, encode
from easyrl.ledger.journal.handed_record import HandedRecord
from easyrl.ledger.journal.reading import journal_files, read_file
from easyrl.ledger.journal.record_file import JournalError
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.rank_coordination import SharedBatch
from easyrl.schema import FinishedSamples, GroupOutcome, PeerOutage, RolloutGroup
from tests.dataloaders.rollout_parts import G, ScriptedGenerate, prompt
from tests.easyrl.ledger.journal_groups import contents, group, journal, read, served, write
from tests.easyrl.ledger.test_journalled_rollouts import (
    BAD,
    ProvedGenerate,
    RankedRun,
    asked,
    begin_again,
    rejecting,
    together,
    withdraw,
)
from tests.thread_ranks import on_ranks
from tests.waiting import wait_until

FOLDER = "batch-000003"


def tokens(prompt: int, responses: Sequence[int]) -> int:
    return prompt + sum(responses)


def ranks_of(
    thread: LoopThread,
    folder: Path,
    attempt: int,
    generates: Sequence[ScriptedGenerate],
    **rules: Any,
) -> list[JournalledRollouts]:
    """A rank for each of ``generates``; all may be the same."""
    rules = {"batch_size": 4, "in_prompt_order": False, "cost_of": tokens} | rules
    run = RankedRun(len(generates))
    return [
        run.rollouts(thread, folder, attempt, generate, **rules)[rank]
        for rank, generate in enumerate(generates)
    ]


def drained(stream: GroupStream) -> list[RolloutGroup]:
    return [g for ready in iter(lambda: stream.drain_ready(50), []) for g in ready]


def handovers(folder: Path) -> list[tuple[int, int, int, int]]:
    """Attempt and rank that took it, prompt, and rank that had drawn it."""
    return [
        (file.attempt, file.rank, record.key[1], record.rank)
        for file in journal_files(folder / FOLDER)
        for _, record in read_file(file, 3)[1]
        if isinstance(record, HandoverRecord)
    ]


def two_begun(
    thread: LoopThread, folder: Path, generate: type[ScriptedGenerate] = ScriptedGenerate
) -> tuple[list[JournalledRollouts], list[ScriptedGenerate], list[Any]]:
    """Rank 0 has drawn prompts 0 and 1, rank 1 has drawn 2 and 3; nothing is finished."""
    generates = [generate() for _ in range(2)]
    ranks = ranks_of(thread, folder, 0, generates)
    batches = []
    for rollouts, own in zip(ranks, generates, strict=True):
        batches.append(rollouts.begin(served(0), 0))
        wait_until(lambda own=own: len(own.asked) == 2 * G)
    assert [asked(own) for own in generates] == [{0, 1}, {2, 3}]
    return ranks, generates, batches


def handed_over(
    thread: LoopThread, folder: Path, generate: type[ScriptedGenerate] = ScriptedGenerate
) -> tuple[list[JournalledRollouts], list[ScriptedGenerate], list[Any]]:
    """As ``two_begun``; rank 0 has finished both: it keeps prompt 0, and 1 goes to rank 1."""
    ranks, generates, batches = two_begun(thread, folder, generate)
    for index, rank in ((0, 0), (1, 1)):
        generates[0].release(thread, index)
        wait_until(lambda rank=rank: batches[rank].num_waiting == 1)
    return ranks, generates, batches


def trained_in(ranks: Sequence[JournalledRollouts], attempt: int) -> list[list[RolloutGroup]]:
    """What each rank is handed out of the batch."""
    batches = [rollouts.begin(served(attempt), 0) for rollouts in ranks]
    return together([lambda b=batch: drained(b.updates[0]) for batch in batches])


def indices(shares: Sequence[Sequence[RolloutGroup]]) -> list[list[int]]:
    return [sorted(g.prompt.index for g in share) for share in shares]


# ---- within an attempt ---------------------------------------------------------------------------


def test_a_finished_group_goes_to_the_rank_that_has_nothing_to_train(tmp_path: Path) -> None:
    with LoopThread() as thread:
        _, generates, batches = handed_over(thread, tmp_path)
        assert handovers(tmp_path) == [(0, 1, 1, 0)]
        for index in (2, 3):
            generates[1].release(thread, index)
        shares = together([lambda b=batch: drained(b.updates[0]) for batch in batches])
    assert indices(shares) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0], [1, 2, 3]])
    (moved,) = [g for g in shares[1] if g.prompt.index == 1]
    (journalled,) = [each for each in read(tmp_path) if each.key == (0, 1)]
    assert (journalled.rank, journalled.digest) == (0, moved.digest)
    assert contents(replace(journalled.group, prompt=prompt(1))) == contents(moved)
    assert moved.drawn_by == 0 and moved.bytes_moved > 0 and moved.completed_s > moved.dispatched_s
    outcome = GroupOutcome.of(moved)
    assert (outcome.drawn_by, outcome.recovered) == (0, False)
    (kept,) = [g for g in shares[0] if g.prompt.index == 0]
    assert kept.drawn_by is None and kept.bytes_moved == 0
    totals = BatchTotals()
    for each in (moved, kept):
        totals.add_counts(GroupCounts.of(each))
    assert totals.metrics.sums["groups_moved"] == 1.0
    assert totals.metrics.sums["bytes_moved"] == moved.bytes_moved


@pytest.mark.parametrize("rules", [{"cost_of": None}, {"in_prompt_order": True}])
def test_nothing_moves_in_strict_mode_nor_without_balance(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    generate = ScriptedGenerate(range(12))
    with LoopThread() as thread:
        shares = trained_in(ranks_of(thread, tmp_path, 0, [generate] * 2, **rules), 0)
    assert sorted(sum(indices(shares), [])) == [0, 1, 2, 3] and handovers(tmp_path) == []
    assert all(g.drawn_by is None for share in shares for g in share)
    if "in_prompt_order" in rules:
        assert indices(shares) == [[0, 2], [1, 3]]


def test_refused_groups_stay_where_they_were_drawn(tmp_path: Path) -> None:
    generate = ScriptedGenerate(range(12))
    with LoopThread() as thread:
        ranks = ranks_of(thread, tmp_path, 0, [generate] * 2, accept=rejecting(0, 1, 2, 3))
        batches = [rollouts.begin(served(0), 0) for rollouts in ranks]
        shares = together([lambda b=batch: drained(b.updates[0]) for batch in batches])
    assert sorted(sum(indices(shares), [])) == [4, 5, 6, 7]
    ranks_of_records = {each.key[1]: each.rank for each in read(tmp_path)}
    for rank, batch in enumerate(batches):
        assert all(ranks_of_records[each.index] == rank for each in batch.refused)
    assert sum(len(batch.refused) for batch in batches) == 4


@pytest.mark.parametrize("seed", range(4))
def test_every_group_is_trained_once_whoever_has_drawn_it(tmp_path: Path, seed: int) -> None:
    """Random times and refusals, three ranks, two updates."""
    rng = random.Random(seed)
    generates = [ScriptedGenerate() for _ in range(3)]
    rejected = {index for index in range(12) if rng.random() < 0.3}
    rules = {"batch_size": 6, "num_updates": 2, "accept": rejecting(*rejected)}
    with LoopThread() as thread:
        ranks = ranks_of(thread, tmp_path, 0, generates, **rules)
        batches = [rollouts.begin(served(0), 0) for rollouts in ranks]

        def finish() -> list[Any]:
            while not all(b.membership.complete for b in batches):
                gates = [(g, i) for g in generates for i in list(g.gates) if i not in g.open]
                if gates:
                    own, index = rng.choice(gates)
                    own.open.add(index)
                    own.release(thread, index)
                time.sleep(0.002)
            return []

        def train(batch: Any) -> list[list[int]]:
            return [[g.prompt.index for g in drained(update)] for update in batch.updates]

        _, *shares = together([finish, *(lambda b=batch: train(b) for batch in batches)])
    accepted = [index for index in range(12) if index not in rejected][:6]
    by_update = [sorted(sum((share[u] for share in shares), [])) for u in range(2)]
    assert by_update == [accepted[:3], accepted[3:]]
    assert {each[2] for each in handovers(tmp_path)} <= set(accepted)


def test_what_was_moved_is_counted_over_all_ranks_and_named(tmp_path: Path) -> None:
    """Rank 1 has trained two groups of rank 0, of which one was recovered."""
    made = [replace(group(index), drawn_by=0) for index in (1, 2)] + [group(3)]
    made[0] = replace(made[0], bytes_moved=500)

    def work(collectives: Collectives) -> BatchTotals:
        totals = BatchTotals()
        for each in [group(0)] if collectives.ranks.rank == 0 else made:
            totals.add_counts(GroupCounts.of(each, recovered=each.prompt.index == 2))
        return totals.merge(collectives)

    for totals in on_ranks(2, work):
        named = [(g.position, g.rank, g.drawn_by) for g in totals.groups]
        assert named == [(0, 0, None), (1, 1, 0), (2, 1, 0), (3, 1, None)]
        metrics = batch_metrics([Update(totals), Update(totals)], totals.groups)
        assert metrics["balance/groups_moved"] == 2.0
        assert metrics["balance/bytes_moved"] == 1000.0
    alone = BatchTotals()
    alone.add_counts(GroupCounts.of(group(0)))
    assert not any(name.startswith("balance/") for name in batch_metrics([Update(alone)], ()))


# ---- over the end of an attempt ------------------------------------------------------------------


def test_a_resume_on_the_same_ranks_repeats_hand_overs_and_drains(tmp_path: Path) -> None:
    with LoopThread() as thread:
        _, generates, batches = handed_over(thread, tmp_path)
        for index in (2, 3):
            generates[1].release(thread, index)
        first = together([lambda b=batch: drained(b.updates[0]) for batch in batches])
    for attempt in (1, 2):
        with LoopThread() as thread:
            ranks = ranks_of(thread, tmp_path, attempt, [ScriptedGenerate()] * 2)
            again = trained_in(ranks, attempt)
        for before, after in zip(first, again, strict=True):
            assert list(map(contents, before)) == list(map(contents, after))  # in this order
            assert [g.drawn_by for g in before] == [g.drawn_by for g in after]
            assert all(g.bytes_moved == 0 for g in after)
    assert {each[0] for each in handovers(tmp_path)} == {0}


def test_a_killed_attempt_goes_on_with_what_was_handed_over(tmp_path: Path) -> None:
    with LoopThread() as thread:
        handed_over(thread, tmp_path)
    generate = ScriptedGenerate(range(4))
    with LoopThread() as thread:
        shares = trained_in(ranks_of(thread, tmp_path, 1, [generate] * 2), 1)
    assert asked(generate) == {2, 3} and sorted(sum(indices(shares), [])) == [0, 1, 2, 3]
    assert [[g.prompt.index for g in share if g.drawn_by == 0] for share in shares][1][:1] == [1]
    assert 0 in indices(shares)[0] and 1 in indices(shares)[1]


def _dies_before_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: SharedBatch, *told: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(SharedBatch, "publish", publish)


def _dies_before_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(self: Any, *told: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(batch_module.BatchJournal, "receive", receive)


def _dies_before_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, *told: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr("easyrl.dataloaders.producer.open_batch.OpenBatch.add_handed_over", add)


@pytest.mark.parametrize(
    ("dies", "trained_by"),
    [
        (_dies_before_the_decision, 0),
        (_dies_before_the_record, 0),
        (_dies_before_the_stream, 1),  # the record stands
    ],
)
def test_a_rank_that_dies_on_the_way_loses_nothing_and_doubles_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dies: Callable[[pytest.MonkeyPatch], None],
    trained_by: int,
) -> None:
    with LoopThread() as thread:
        _, generates, batches = two_begun(thread, tmp_path)
        generates[0].release(thread, 0)
        wait_until(lambda: batches[0].num_waiting == 1)
        with monkeypatch.context() as patched:
            dies(patched)
            generates[0].release(thread, 1)
            for batch in batches:
                with pytest.raises((ProducerError, PeerOutage), match="killed"):
                    batch.updates[0].complete()
    assert len(handovers(tmp_path)) == trained_by
    generate = ScriptedGenerate(range(4))
    with LoopThread() as thread:
        shares = trained_in(ranks_of(thread, tmp_path, 1, [generate] * 2), 1)
    assert asked(generate) == {2, 3} and sorted(sum(indices(shares), [])) == [0, 1, 2, 3]
    assert 1 in indices(shares)[trained_by]
    assert sorted(each.key[1] for each in read(tmp_path)) == [0, 1, 2, 3]  # each made once


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_trains_each_group_once(tmp_path: Path, num_ranks: int) -> None:
    with LoopThread() as thread:
        handed_over(thread, tmp_path)
    generate = ScriptedGenerate(range(4))
    with LoopThread() as thread:
        shares = trained_in(ranks_of(thread, tmp_path, 1, [generate] * num_ranks), 1)
    assert asked(generate) == {2, 3} and sorted(sum(indices(shares), [])) == [0, 1, 2, 3]
    assert 1 in indices(shares)[1 % num_ranks]


def test_pieces_with_responses_of_a_handed_over_group_are_repeated(tmp_path: Path) -> None:
    """Rank 0 looked ahead at prompt 1 together with prompt 0, before rank 1 got it."""

    def piece(stream: GroupStream, made: Sequence[RolloutGroup]) -> None:
        stream.note_ahead([FinishedSamples(g.prompt, {0: g.completions[0]}) for g in made])

    with LoopThread() as thread:
        _, _, batches = handed_over(thread, tmp_path)
        made = sorted((each.group for each in read(tmp_path)), key=lambda g: g.prompt.index)
        piece(batches[0].updates[0], made)
        batches[0].updates[0].drain_ready(50)
    with LoopThread() as thread:
        ranks = ranks_of(thread, tmp_path, 1, [ScriptedGenerate()] * 2)
        batches = [rollouts.begin(served(1), 0) for rollouts in ranks]
        (again,) = batches[0].updates[0].ahead_of_drain(50)
        assert [(each.prompt.index, list(each.completions)) for each in again] == [
            (0, [0]),
            (1, [0]),
        ]


# ---- withdrawal ----------------------------------------------------------------------------------


def test_a_batch_that_begins_again_forgets_its_hand_overs(tmp_path: Path) -> None:
    """Of prompts 0 and 1, which rank 0 has finished, 1 was made by the endpoint that is withdrawn:
    rank 1 must not train it. What a rank has journalled is then its own, in the next attempt too.
    """
    with LoopThread() as thread:
        ranks, generates, batches = handed_over(thread, tmp_path, ProvedGenerate)
        withdraw(thread, ranks[1], 1)
        for own in generates:
            own.asked.clear()
            own.open, own.proofs[BAD] = set(range(4)), 2  # type: ignore[attr-defined]
        batches = begin_again(ranks, batches)
        shares = together([lambda b=batch: drained(b.updates[0]) for batch in batches])
        assert sorted(sum(indices(shares), [])) == [0, 1, 2, 3] and 0 in indices(shares)[0]
        assert set.union(*map(asked, generates)) == {1, 2, 3}
        (again,) = [g for share in shares for g in share if g.prompt.index == 1]
        assert {c.proof for c in again.completions} == {2}
    with LoopThread() as thread:
        resumed = trained_in(ranks_of(thread, tmp_path, 1, [ScriptedGenerate()] * 2), 1)
    for before, after in zip(shares, resumed, strict=True):
        assert list(map(contents, before)) == list(map(contents, after))


def test_a_hand_over_before_the_last_withdrawal_does_not_stand(tmp_path: Path) -> None:
    """The good group goes back to the rank that drew it, also if it is killed then."""
    with LoopThread() as thread:
        ranks, generates, batches = two_begun(thread, tmp_path, ProvedGenerate)
        for index, rank in ((1, 0), (0, 1)):  # now prompt 0, of the good endpoint, moves
            generates[0].release(thread, index)
            wait_until(lambda rank=rank: batches[rank].num_waiting == 1)
        assert handovers(tmp_path) == [(0, 1, 0, 0)]
        withdraw(thread, ranks[0], 1)
        for own in generates:
            own.gates.clear()
            own.asked.clear()
        begin_again(ranks, batches)
    generate = ScriptedGenerate(range(4))
    with LoopThread() as thread:
        shares = trained_in(ranks_of(thread, tmp_path, 1, [generate] * 2), 1)
    assert 0 in indices(shares)[0] and asked(generate) == {1, 2, 3}
    assert sorted(sum(indices(shares), [])) == [0, 1, 2, 3]


def test_a_group_that_comes_when_the_batch_has_begun_again_is_refused(tmp_path: Path) -> None:
    giver, taker = (journal(tmp_path, rank=rank).open_batch(served(0)) for rank in range(2))
    made, stored = giver.add(group(0))
    payload = giver.give(stored)
    production = batch_module.Production(taker)
    taker.begin_again()
    with pytest.raises(Exception, match="begun again"):
        production.receive(payload, made.prompt)
    assert handovers(tmp_path) == []


# ---- what is sent --------------------------------------------------------------------------------


def test_a_group_arrives_as_it_was_journalled(tmp_path: Path) -> None:
    giver, taker = (journal(tmp_path, rank=rank).open_batch(served(0)) for rank in range(2))
    made, stored = giver.add(group(3))
    taken = taker.receive(giver.give(stored), made.prompt)
    loaded = taken.load()
    assert contents(loaded) == contents(made) and loaded.digest == made.digest
    assert taken.num_tokens == stored.num_tokens and taken.lengths == stored.lengths
    assert loaded.completed_s - loaded.dispatched_s == pytest.approx(1.0)
    assert handovers(tmp_path) == [(0, 1, 3, 0)]


def test_what_is_not_the_group_that_was_sent_is_refused(tmp_path: Path) -> None:
    giver = journal(tmp_path).open_batch(served(0))
    made, stored = giver.add(group(3))
    payload = giver.give(stored)
    handed = decode(HandedGroup, payload, "")
    changed = bytes([handed.record[40] ^ 1]).join((handed.record[:40], handed.record[41:]))
    other = HandedGroup(0, 1.0, b"\x93abc", blake3(b"\x93abc").digest(length=16))
    for bad, problem in (
        (b"", "not a group that was handed over"),
        (payload[:-1], "not a group that was handed over"),
        (encode(HandedGroup(0, 1.0, changed, handed.digest)), "not those that were sent"),
        (encode(other), "not a group"),
    ):
        with pytest.raises(JournalError, match=problem):
            HandedRecord.of(bad, made.prompt)
    with pytest.raises(JournalError, match="rank 0 has another prompt"):
        HandedRecord.of(payload, group(4).prompt)
    with pytest.raises(JournalError, match="rank 0 has another prompt"):
        HandedRecord.of(payload, replace(made.prompt, token_ids=made.prompt.token_ids + 1))


def test_hand_overs_of_other_weights_say_nothing(tmp_path: Path) -> None:
    """An attempt came to other weights: its groups and hand-overs are its own."""
    write(tmp_path, [group(0)], attempt=0, rank=0)
    (made,) = read(tmp_path)
    other = journal(tmp_path, attempt=0, rank=1).open_batch(served(0, digest="cd" * 32))
    giver = journal(tmp_path / "elsewhere").open_batch(served(0))
    _, stored = giver.add(group(0))
    assert stored.place.digest.hex() == made.digest
    other.receive(giver.give(stored), made.group.prompt)
    found = journal(tmp_path, attempt=1).open_batch(served(1)).find(made.group.prompt)
    assert found is not None and found.trains == 0


def test_the_latest_attempt_that_took_a_group_over_trains_it(tmp_path: Path) -> None:
    write(tmp_path, [group(0)], attempt=0, rank=0)
    (made,) = read(tmp_path)
    for attempt, rank in ((0, 1), (1, 2)):
        taker = journal(tmp_path, attempt=attempt, rank=rank).open_batch(served(attempt))
        giver = journal(tmp_path / f"elsewhere{attempt}").open_batch(served(0))
        _, stored = giver.add(group(0))
        taker.receive(giver.give(stored), made.group.prompt)
        found = journal(tmp_path, attempt=attempt + 1).open_batch(served(attempt + 1))
        stood = found.find(made.group.prompt)
        assert stood is not None and stood.trains == rank
    drains = [r for f in journal_files(tmp_path / FOLDER) for _, r in read_file(f, 3)[1]]
    assert not any(isinstance(record, DrainRecord) for record in drains)
