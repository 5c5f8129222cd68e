"""What a replay is given of a run's folder: what is in the weights, and what was trained."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import orjson
import pytest
from blake3 import blake3

from easyrl.build.replay import Replayed
from easyrl.commands.replay import _reasons
from easyrl.config import Config
from easyrl.ledger.journal import Journal
from easyrl.ledger.journal.codec import Piece, encode_drain
from easyrl.ledger.journal.reading import file_name
from easyrl.ledger.recorded_run import RecordedPrompts, RecordedRollouts, RecordedRun
from easyrl.schema import PolicyVersion, Prompt, ServedWeights
from tests.easyrl.ledger.certified_run import (
    FRAME,
    RUN,
    CertifiedRun,
    change_journal,
    finished_group,
    other_token,
)
from tests.recipes import pack_groups


def recorded(run: CertifiedRun) -> RecordedRun:
    """The folder with what a trainer writes beside certificate and journal."""
    (run.folder / "config.yaml").write_text("")
    k = run.run.updates_per_batch
    lines = [{"step": 0}, *({"step": k * (v + 1), "loss": v} for v in range(len(run.batches)))]
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


def test_what_was_computed_ahead_comes_with_its_take(run: CertifiedRun) -> None:
    """A response of a later take too; and nothing of it where drains are not repeated."""
    own = run.batches[1][0::2]
    pieces = [[(own[1].key, [1, 0]), (own[0].key, [1])]]
    note_taken(run, 1, 0, [[2], [0]], ahead=pieces)
    rollouts = RecordedRollouts(recorded(run))
    for budget in (64, 63):
        stream = rollouts.produce(own, ServedWeights(PolicyVersion(RUN, 0, 1), ""))
        found = list(stream.ahead_of_drain(budget))
        if budget == 64:
            [piece] = found
            assert [(s.prompt.key, list(s.completions)) for s in piece] == pieces[0]
            [group] = stream.drain_ready(budget)
            assert np.array_equal(piece[0].completions[1].token_ids, group.completions[1].token_ids)
            assert rollouts.in_prompt_order == set()
        else:
            assert found == [] and rollouts.in_prompt_order == {1}


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
    replayed = Replayed(1, 2, 1, {}, {}, 0, 2, frozenset(in_prompt_order))
    reasons = _reasons(recorded(run), cast(Config, config), replayed, [])
    assert len(reasons) == len(told)
    assert all(part in reason for part, reason in zip(told, reasons, strict=True))


def handed_out(run: RecordedRun, v: int, prompts: list[Prompt], budget: int) -> list[list[int]]:
    served = ServedWeights(PolicyVersion(RUN, 0, v), "")
    stream = RecordedRollouts(run).produce(prompts, served)
    taken = []
    while groups := stream.drain_ready(budget):
        taken.append([group.prompt.index for group in groups])
    return taken


def test_batches_come_as_they_were_dispatched(run: CertifiedRun) -> None:
    keys = [[prompt.key for prompt in prompts] for prompts in RecordedPrompts(recorded(run), 0, 2)]
    assert keys == [[prompt.key for prompt in batch] for batch in run.batches]


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
    assert handed_out(folder, 1, batch, 10_000) == [order]
    assert handed_out(folder, 1, batch, 1) == [[index] for index in order]
    (row,) = pack_groups(  # the journal has all that packing wants
        list(folder.groups(1, frozenset(p.key for p in batch)).values()),
        [np.zeros(2, np.float32)] * len(batch),
        aggregation="token",
        max_tokens=9,
        mask_truncated=False,
        max_tokens_per_micro_batch=10_000,
    )
    assert row.num_sequences == 2 * len(batch)


def note_taken(
    run: CertifiedRun, attempt: int, rank: int, drains: list[list[int]], ahead: Sequence[Piece] = ()
) -> None:
    """Behind the rank's groups of batch 1: what was taken together, by place in the batch."""
    path = run.journal_path / "batch-000001" / file_name(attempt, rank)
    with path.open("ab") as file:
        for take in drains:
            payload = encode_drain([run.batches[1][place].key for place in take], 64, ahead)
            ahead = ()  # before the first
            digest = blake3(payload).digest(length=16)
            file.write(FRAME.pack(len(payload), len(payload) ^ 0xFFFFFFFF, digest) + payload)


def test_groups_come_as_the_certified_attempt_trained_them(run: CertifiedRun) -> None:
    """On a rank that has the prompts of one of the run's, with the run's token budget."""
    note_taken(run, 0, 0, [[0], [2]])  # an attempt that was killed
    note_taken(run, 1, 0, [[2], [0]])
    note_taken(run, 1, 1, [[3, 1]])
    folder, batch = recorded(run), run.batches[1]
    index = [prompt.index for prompt in batch]
    assert handed_out(folder, 1, batch[0::2], 64) == [[index[2]], [index[0]]]
    assert handed_out(folder, 1, batch[1::2], 64) == [[index[3], index[1]]]
    assert handed_out(folder, 1, batch[0::2], 63) == [[index[0], index[2]]]  # to compare budgets
    assert handed_out(folder, 1, batch, 64) == [index]  # one rank instead of two


def test_a_step_names_its_batch(run: CertifiedRun) -> None:
    folder = recorded(run)
    assert [folder.batch_of_step(step) for step in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    for step in (0, 7):
        with pytest.raises(ValueError, match=f"steps 1 to 6, {step} is not one"):
            folder.batch_of_step(step)
    assert [folder.metrics_of(v) for v in range(3)] == [{"loss": v} for v in range(3)]


def test_weights_behind_a_batch_are_those_that_made_the_next(run: CertifiedRun) -> None:
    folder = recorded(run)
    assert folder.weights_after(0) == folder.batch(1).weights
    assert folder.weights_after(2) == run.served().digest  # said at the end of the run


def test_without_an_end_the_last_weights_are_not_known(tmp_path: Path) -> None:
    open_run = CertifiedRun(tmp_path)
    with_two = open_run.begin()
    open_run.train()
    with_two.close()
    assert recorded(open_run).weights_after(0) is None


def test_a_pruned_journal_is_told(run: CertifiedRun) -> None:
    folder = recorded(run)
    Journal(run.journal_path, 9, 0, "never").prune(before_v=1)
    folder.require_journal(1, 2)
    with pytest.raises(ValueError, match="batch 0.* the journal goes back to step 3.*keep=all"):
        folder.require_journal(0, 2)


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
