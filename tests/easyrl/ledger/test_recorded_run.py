"""What a replay is given of a run's folder: what is in the weights, and what was trained."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import orjson
import pytest

from easyrl.build.replay import Replayed
from easyrl.commands.replay import reasons_to_differ
from easyrl.config import Config
from easyrl.dataloaders.producer.group_stream import GroupStream
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.journal.codec import DrainRecord, Piece, encode
from easyrl.ledger.journal.reading import file_name
from easyrl.ledger.recorded_run import RecordedBatch, RecordedRollouts, RecordedRun
from easyrl.runtime.ranks import Ranks
from easyrl.schema import PolicyVersion, ServedWeights
from tests.easyrl.ledger.certified_run import (
    RUN,
    CertifiedRun,
    append_to_journal,
    change_journal,
    finished_group,
    other_token,
    with_refused,
)
from tests.recipes import pack_groups

ONE_RANK = Ranks.data_parallel()


def recorded(run: CertifiedRun) -> RecordedRun:
    """The folder with what a trainer writes beside certificate and journal."""
    (run.folder / "config.yaml").write_text("")
    lines = [{"step": 0}, *({"step": step, "loss": v} for v, step in enumerate(run.steps))]
    (run.folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(m) + b"\n" for m in lines))
    return RecordedRun(run.folder)


@pytest.fixture
def run(tmp_path: Path) -> CertifiedRun:
    """Killed in its second batch on one rank; begun again on two, which come to other weights."""
    killed = CertifiedRun(tmp_path, updates_per_batch=2)
    killed.begin()
    killed.train()
    killed.generate(2)  # journalled and never trained: made by the weights of one rank
    killed.certificate.close()
    killed.begin(first_batch=1, num_ranks=2)
    killed.train_all()
    return killed


def test_what_was_computed_ahead_comes_with_its_drain(run: CertifiedRun) -> None:
    """A response of a later drain too; and nothing of it where drains are not repeated."""
    first, later = run.batches[1][0], run.batches[1][2]  # of rank 0, one in each update
    pieces = [[(first.key, [1, 0])], [(first.key, [1])]]
    note_drained(run, 1, 0, [[0]], ahead=pieces)
    note_drained(run, 1, 0, [[2]], ahead=[[(later.key, [1])]])
    for budget in (64, 63):
        rollouts = RecordedRollouts(recorded(run), 2, 2, budget, Ranks.data_parallel(0, 2))
        streams = begin(rollouts, 1).updates
        found = [list(stream.ahead_of_drain(budget)) for stream in streams]
        if budget == 64:
            assert [[[(s.prompt.key, list(s.completions)) for s in piece] for piece in each]
                    for each in found] == [pieces, [[(later.key, [1])]]]  # fmt: skip
            [group] = streams[0].drain_ready(budget)
            samples = found[0][0][0].completions
            assert np.array_equal(samples[1].token_ids, group.completions[1].token_ids)
            assert rollouts.in_prompt_order == set()
        else:
            assert found == [[], []] and rollouts.in_prompt_order == {1}


@pytest.mark.parametrize(
    ("determinism", "in_prompt_order", "told"),
    [
        ("none", set(), ["are trained in the run's order, but nothing keeps the arithmetic"]),
        (
            "none",
            {2, 1},
            ["batch 1, 2 are trained in the order of their prompts, not in the run's"],
        ),
        ("strict", {1}, []),  # there it is the run's
    ],
)
def test_a_replay_says_whether_groups_come_in_the_runs_order(
    run: CertifiedRun, determinism: str, in_prompt_order: set[int], told: list[str]
) -> None:
    config = SimpleNamespace(run=SimpleNamespace(determinism=determinism))
    replayed = Replayed(1, 2, 1, {}, {}, Ranks.data_parallel(0, 2), frozenset(in_prompt_order))
    reasons = reasons_to_differ(recorded(run), cast(Config, config), replayed, [])
    assert len(reasons) == len(told)
    assert all(part in reason for part, reason in zip(told, reasons, strict=True))


def begin(rollouts: RecordedRollouts, v: int) -> RecordedBatch:
    return rollouts.begin(ServedWeights(PolicyVersion(RUN, 0, v), ""), -1)


def drained(stream: GroupStream, budget: int) -> list[list[int]]:
    ready = iter(lambda: stream.drain_ready(budget), [])
    return [[group.prompt.index for group in groups] for groups in ready]


def handed_out(
    run: RecordedRun, v: int, budget: int, ranks: Ranks = ONE_RANK
) -> list[list[list[int]]]:
    """By update, what comes together."""
    batch = begin(RecordedRollouts(run, v, 2, budget, ranks), v)
    return [drained(stream, budget) for stream in batch.updates]


def test_batches_come_as_they_were_dispatched(run: CertifiedRun) -> None:
    rollouts = RecordedRollouts(recorded(run), 1, 2, 64, ONE_RANK)
    for v in range(2):
        assert rollouts.has_more(-1)
        keys = [g.prompt.key for stream in begin(rollouts, v).updates for g in stream]
        assert keys == [prompt.key for prompt in run.batches[v]]
    assert not rollouts.has_more(-1)  # batch 2 is not to be replayed


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_refused_groups_are_told_and_not_handed_out(tmp_path: Path, num_ranks: int) -> None:
    """As the run had them on its two ranks; on another number, each of them on one."""
    run = with_refused(
        tmp_path,
        {(1, 0): "rejected", (1, 2): "excluded", (2, 1): "rejected"},
        updates_per_batch=2,
    )
    run.begin(num_ranks=2)
    run.train_all()
    folder = recorded(run)
    all_ranks = [Ranks.data_parallel(rank, num_ranks) for rank in range(num_ranks)]
    for v, ended_by in ((1, "accepted"), (2, "data")):
        batches = [begin(RecordedRollouts(folder, 2, 2, 64, ranks), v) for ranks in all_ranks]
        assert {batch.membership.ended_by for batch in batches} == {ended_by}
        refused = [group.key for batch in batches for group in batch.refused]
        assert sorted(refused) == sorted(
            prompt.key for prompt in run.batches[v] if prompt.key in run.refused
        )
        accepted = [prompt.index for prompt in run.accepted(v)]
        by_update: list[list[int]] = [[], []]
        for rank, batch in enumerate(batches):
            for update, stream in enumerate(batch.updates):
                (indices,) = drained(stream, 10_000) or [[]]
                by_update[update] += indices
                if num_ranks == 2:
                    positions = [
                        p for p, each in enumerate(run.batches[v]) if each.index in indices
                    ]
                    assert all(position % 2 == rank for position in positions)
        assert [sorted(part) for part in by_update] == [sorted(accepted[:2]), sorted(accepted[2:])]


def test_only_the_groups_that_were_trained_are_handed_out(run: CertifiedRun) -> None:
    folder, batch = recorded(run), run.batches[1]
    found = folder.groups(1, frozenset(prompt.key for prompt in batch))
    served = ServedWeights(PolicyVersion(RUN, 1, 1), "")
    for prompt in batch:
        expected = finished_group(prompt, served)  # of the second attempt
        ours, theirs = found[prompt.key].completions, expected.completions
        assert all(
            np.array_equal(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)
        )
        assert found[prompt.key].scores == expected.scores


def test_groups_come_in_prompt_order_within_the_budget(run: CertifiedRun) -> None:
    folder, batch = recorded(run), run.batches[1]
    order = [prompt.index for prompt in batch]
    assert handed_out(folder, 1, 10_000) == [[order[:2]], [order[2:]]]
    assert handed_out(folder, 1, 1) == [
        [[index] for index in order[:2]],
        [[index] for index in order[2:]],
    ]
    (row,) = pack_groups(  # the journal has all that packing wants
        list(folder.groups(1, frozenset(p.key for p in batch)).values()),
        [np.zeros(2, np.float32)] * len(batch),
        aggregation="token",
        max_tokens=9,
        mask_truncated=False,
        max_tokens_per_micro_batch=10_000,
    )
    assert row.num_sequences == 2 * len(batch)


def note_drained(
    run: CertifiedRun,
    attempt: int,
    rank: int,
    drains: list[list[int]],
    ahead: Sequence[Piece] = (),
    restart: int = 0,
) -> None:
    """Behind the rank's groups of batch 1: what was drained at once, by place in the batch."""
    path = run.journal_path / "batch-000001" / file_name(attempt, rank)
    for places in drains:
        keys = [run.batches[1][place].key for place in places]
        drain = DrainRecord(keys, 64, places[0] // 2, list(ahead), restart)
        append_to_journal(path, encode(drain))
        ahead = ()  # before the first


def test_groups_come_as_the_certified_attempt_trained_them(tmp_path: Path) -> None:
    """On a rank that has the prompts of one of the run's, with the run's token budget."""
    run = CertifiedRun(tmp_path, num_prompts=12, batch_size=8, epochs=2)
    run.begin()
    run.train()
    run.generate(4)
    run.begin(first_batch=1, num_ranks=2)
    run.train_all()
    note_drained(run, 0, 0, [[0], [2]])  # an attempt that was killed
    note_drained(run, 1, 0, [[2, 0], [4, 6]])  # the batch began again behind it
    note_drained(run, 1, 0, [[2], [6, 0], [4]], restart=1)
    note_drained(run, 1, 1, [[3, 1], [5], [7]])
    folder, batch = recorded(run), run.batches[1]
    index = [prompt.index for prompt in batch]

    def given(budget: int, ranks: Ranks) -> list[list[int]]:
        (stream,) = begin(RecordedRollouts(folder, 1, 1, budget, ranks), 1).updates
        return drained(stream, budget)

    first, second = (Ranks.data_parallel(rank, 2) for rank in range(2))
    assert given(64, first) == [[index[2]], [index[6], index[0]], [index[4]]]
    assert given(64, second) == [[index[3], index[1]], [index[5]], [index[7]]]
    assert sum(given(63, first), []) == index[0::2]  # to compare budgets
    assert sum(given(64, ONE_RANK), []) == index  # one rank instead of two


def test_each_update_comes_as_it_was_drained(run: CertifiedRun) -> None:
    note_drained(run, 1, 0, [[0], [2]])
    note_drained(run, 1, 1, [[1], [3]])
    folder, index = recorded(run), [prompt.index for prompt in run.batches[1]]
    for rank in range(2):
        ranks = Ranks.data_parallel(rank, 2)
        assert handed_out(folder, 1, 64, ranks) == [[[index[rank]]], [[index[2 + rank]]]]


def test_a_step_names_its_batch(run: CertifiedRun) -> None:
    folder = recorded(run)
    assert [folder.batch_of_step(step) for step in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    for step in (0, 7):
        with pytest.raises(ValueError, match=f"steps 1 to 6, {step} is not one"):
            folder.batch_of_step(step)
    assert [folder.metrics_of(v) for v in range(3)] == [{"loss": v} for v in range(3)]


def test_weights_behind_a_batch_are_those_that_made_the_next(run: CertifiedRun) -> None:
    folder = recorded(run)
    assert folder.weights_before(1) == folder.batch(1).weights
    assert folder.weights_before(3) == run.served().digest  # said at the end of the run


def test_without_an_end_the_last_weights_are_not_known(tmp_path: Path) -> None:
    open_run = CertifiedRun(tmp_path)
    with_two = open_run.begin()
    open_run.train()
    with_two.close()
    assert recorded(open_run).weights_before(1) is None


def test_a_pruned_journal_is_told(run: CertifiedRun) -> None:
    folder = recorded(run)
    Journal(run.journal_path, 9, 0, "never").prune(before_v=1)
    folder.require_journal(1, 2)
    with pytest.raises(ValueError, match="batch 0.* the journal goes back to step 3.*keep=all"):
        folder.require_journal(0, 2)


def test_steps_that_can_be_replayed_go_back_to_a_checkpoint_or_to_the_start(
    run: CertifiedRun,
) -> None:
    folder = recorded(run)
    assert folder.replayable_steps() == [1, 2, 3, 4, 5, 6]
    Journal(run.journal_path, 9, 0, "never").prune(before_v=1)
    assert folder.replayable_steps() == []  # each builds on batch 0
    (folder.folder / "checkpoints" / "step-4").mkdir(parents=True)
    assert folder.replay_begins(2) == 2 and folder.replayable_steps() == [5, 6]
    (folder.folder / "checkpoints" / "step-2").mkdir()
    assert folder.replay_begins(1) == 1 and folder.replayable_steps() == [3, 4, 5, 6]


def test_a_journal_that_was_changed_is_told(run: CertifiedRun) -> None:
    folder, keys = recorded(run), frozenset(prompt.key for prompt in run.batches[2])
    (path, *_) = sorted(run.journal_path.glob("batch-000002/*"))
    change_journal(path, other_token, recompute=True)
    with pytest.raises(ValueError, match="has not the group of prompt .* see easyrl verify"):
        folder.groups(2, keys)


def test_a_broken_certificate_is_told(run: CertifiedRun) -> None:
    folder = recorded(run).folder
    lines = run.lines()
    run.write_lines([*lines[:2], *lines[3:]])
    with pytest.raises(ValueError, match="certificate.jsonl line 3.*see easyrl verify"):
        RecordedRun(folder)
    (folder / "certificate.jsonl").unlink()
    with pytest.raises(ValueError, match="has no certificate.jsonl"):
        RecordedRun(folder)
