"""What ``easyrl verify`` and a replay make of groups that one rank drew and another trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson
import pytest

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.journal.codec import DrainRecord, HandoverRecord, encode
from easyrl.ledger.journal.reading import batch_folder, file_name
from easyrl.ledger.recorded_run import RecordedRollouts, RecordedRun
from easyrl.ledger.verify import verify
from easyrl.runtime.ranks import Ranks
from easyrl.schema import GroupOutcome, PolicyVersion, ServedWeights
from tests.easyrl.ledger.certified_run import RUN, CertifiedRun, append_to_journal

replace = msgspec.structs.replace
V = 1  # the batch whose first group is handed over


def journal_of(run: CertifiedRun, rank: int, attempt: int = 0) -> Path:
    return batch_folder(run.journal_path, V) / file_name(attempt, rank)


def first(run: CertifiedRun, **changes: object) -> None:
    """Of batch 1's first group, which rank 0 has drawn."""

    def edit(record: BatchRecord) -> BatchRecord:
        return replace(record, groups=[replace(record.groups[0], **changes), *record.groups[1:]])

    run.forge_batch(V, edit)


def outcome(run: CertifiedRun) -> GroupOutcome:
    """Of the same."""
    return RecordedRun(run.folder).batch(V).groups[0]


@pytest.fixture
def run(tmp_path: Path) -> CertifiedRun:
    """Two ranks; rank 1 has trained the first group of batch 1, which rank 0 drew."""
    made = CertifiedRun(tmp_path)
    made.begin(num_ranks=2)
    made.train_all()
    (made.folder / "config.yaml").write_text("")
    lines = [{"step": 0}, *({"step": step, "loss": v} for v, step in enumerate(made.steps))]
    (made.folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(m) + b"\n" for m in lines))
    group = outcome(made)
    told = HandoverRecord(group.key, str(group.digest), 0, 0)
    append_to_journal(journal_of(made, 1), encode(told))
    first(made, rank=1, drawn_by=0)
    return made


def test_a_group_that_one_rank_drew_and_another_trained_is_on_policy(run: CertifiedRun) -> None:
    verdict = verify(run.folder)
    assert verdict.on_policy, str(verdict)
    line = next(line for line in run.lines() if b'"drawn_by"' in line)
    assert line.count(b'"drawn_by":0') == 1  # of the others nothing is said


def without_hand_over(run: CertifiedRun) -> None:
    path = journal_of(run, 1)
    end = encode("handover")
    data = path.read_bytes()
    payload = encode(HandoverRecord(outcome(run).key, str(outcome(run).digest), 0, 0))
    assert payload.endswith(end) and data.endswith(payload)
    path.write_bytes(data[: -len(payload) - 24])  # with its frame


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (without_hand_over, "drawn by rank 0 and trained by rank 1, whose journal has no hand-ov"),
        (lambda run: first(run, rank=0, drawn_by=1), "drawn by: rank 1 in the certificate, 0 in"),
        (lambda run: first(run, drawn_by=None), "drawn by: rank 1 in the certificate, 0 in the"),
        (lambda run: first(run, rank=1, drawn_by=2), "was drawn by rank 2 of 2"),
        (lambda run: first(run, rank=1, drawn_by=1), "was drawn by rank 1 for itself"),
    ],
)
def test_what_was_not_so_is_found(
    run: CertifiedRun, edit: Callable[[CertifiedRun], None], problem: str
) -> None:
    key = outcome(run).key
    edit(run)
    verdict = verify(run.folder)
    assert not verdict.on_policy and problem in str(verdict.violation)
    assert f"prompt {key[1]}" in str(verdict.violation)


def test_the_certificate_refuses_it_before_the_step(tmp_path: Path) -> None:
    """The trainer asks the same before it trains."""
    made = CertifiedRun(tmp_path)
    made.begin(num_ranks=2)
    record = made.generate()
    bad = replace(record, groups=[replace(record.groups[0], drawn_by=2), *record.groups[1:]])
    with pytest.raises(CertificateError, match="drawn by rank 2 of 2"):
        made.certificate.check(bad, whole=True)
    made.certificate.check(record, whole=True)


def test_a_group_of_an_attempt_with_more_ranks_keeps_the_rank_that_drew_it(tmp_path: Path) -> None:
    made = CertifiedRun(tmp_path)
    made.begin(num_ranks=3)
    made.generate()  # the first batch, by weights that do not depend on the ranks
    made.certificate.close()
    made.begin(num_ranks=2)
    made.train_all()
    assert verify(made.folder).on_policy
    (made.folder / "config.yaml").write_text("")
    (made.folder / "metrics.jsonl").write_text("")
    groups = RecordedRun(made.folder).batch(0).groups
    assert [(g.rank, g.drawn_by) for g in groups] == [(0, None), (1, None), (0, 2), (1, 0)]
    made.forge_batch(
        0,
        lambda r: replace(r, groups=[*r.groups[:2], replace(r.groups[2], drawn_by=1), r.groups[3]]),
    )
    assert "drawn by: rank 1 in the certificate, 2 in the journal" in str(verify(made.folder))


def test_a_replay_hands_a_group_to_the_rank_that_trained_it(run: CertifiedRun) -> None:
    """Its drain is repeated; the rank that drew it repeats what it had computed ahead of it."""
    groups = RecordedRun(run.folder).batch(V).groups
    mine = [[g.key for g in groups if g.rank == rank] for rank in range(2)]
    assert [len(keys) for keys in mine] == [1, 3]
    moved = groups[0].key
    pieces = [[(mine[0][0], [0]), (moved, [1])]]
    order = [mine[1][1], moved, mine[1][2]]
    for rank, keys, ahead in ((0, mine[0], pieces), (1, order, [])):
        append_to_journal(journal_of(run, rank), encode(DrainRecord(keys, 64, 0, ahead)))
    for rank, keys in enumerate((mine[0], order)):
        recorded = RecordedRun(run.folder)
        rollouts = RecordedRollouts(recorded, 2, 1, 64, Ranks.data_parallel(rank, 2))
        served = ServedWeights(PolicyVersion(RUN, 0, V), "")
        (stream,) = rollouts.begin(served, -1).updates
        found = list(stream.ahead_of_drain(64))
        assert [[(s.prompt.key, list(s.completions)) for s in p] for p in found] == (
            pieces if rank == 0 else []
        )
        assert [g.prompt.key for g in stream.drain_ready(64)] == keys
        assert rollouts.in_prompt_order == set()
