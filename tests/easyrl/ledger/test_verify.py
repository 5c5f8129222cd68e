"""What ``easyrl verify`` says of runs that are in order, and of planted violations."""

import dataclasses
import itertools
import json
import shutil
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.build.recipe_digest import recipe_digest
from easyrl.config.file import dump_config, validate_config
from easyrl.ledger import evidence
from easyrl.ledger.certificate.chain import START, ChainReader, chain_hash, encode_line
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import BatchRecord, EndRecord
from easyrl.ledger.journal.batch import Journal
from easyrl.ledger.journal.codec import EVER, WithdrawalRecord, encode
from easyrl.ledger.verify import verify
from easyrl.schema import (
    EndpointAgreement,
    PolicyVersion,
    ServedWeights,
    VersionSpan,
    WeightProof,
)
from tests.easyrl.ledger import certified_run
from tests.easyrl.ledger.certificate_violations import VIOLATIONS, instead_of_first
from tests.easyrl.ledger.certified_run import (
    RUN,
    URLS,
    CertifiedRun,
    append_to_journal,
    change_journal,
    other_token,
    with_refused,
    with_span,
)

replace = msgspec.structs.replace


@pytest.fixture
def run(tmp_path):
    """Three batches in one attempt; the lines are 1 run, 2 attempt, 3 to 5 batches, 6 end."""
    complete = CertifiedRun(tmp_path)
    complete.begin()
    complete.train_all()
    return complete


def violation(run):
    verdict = verify(run.folder)
    assert not verdict.on_policy and str(verdict).startswith("NOT on-policy: ")
    return verdict.violation


def instead(group, key, position):
    return replace(group, epoch=key[0], index=key[1], position=position)


def instead_of(record, key, other):
    """``record`` with prompt ``other`` where ``key`` was."""
    return replace(record, groups=[
        instead(g, other, g.position) if g.key == key else g for g in record.groups])  # fmt: skip


# ---- in order -----------------------------------------------------------------------------------


def test_a_complete_run(run):
    assert str(verify(run.folder)) == "on-policy: 3 batches, 12 groups trained, complete"


def test_a_run_without_a_batch(tmp_path):
    CertifiedRun(tmp_path).begin().close()
    text = "on-policy: 0 batches, 0 groups trained, not complete"
    assert str(verify(tmp_path)) == text


def test_attempts_that_were_killed(tmp_path):
    """Superseded lines, recovered and discarded groups and a torn line are no violations."""
    run = CertifiedRun(tmp_path)
    run.begin(num_ranks=2)
    run.train()
    run.train()
    run.generate(1)  # of batch 2, one on each rank; killed
    run.begin(1, num_ranks=1)  # comes to other bits: batch 1 is generated again
    run.train()
    run.begin(1, num_ranks=2)  # those of the first attempt again
    run.train_all()
    whole = run.certificate_path.read_bytes()
    run.certificate_path.write_bytes(whole + b'{"previous":"')
    verdict = verify(tmp_path)
    assert (verdict.attempts, verdict.superseded, verdict.torn) == (3, 2, True)
    assert (verdict.recovered, verdict.discarded) == (6, 0)
    run.begin(1, num_ranks=1)
    run.train_all()
    verdict = verify(tmp_path)
    assert (verdict.attempts, verdict.superseded, verdict.torn) == (4, 4, False)
    assert (verdict.recovered, verdict.discarded) == (
        4,
        4,
    )  # 1: of attempt 1; 2: none of these bits
    assert str(verdict) == (
        "on-policy: 3 batches, 12 groups trained, 4 recovered from the journal, 4 discarded and "
        "generated again, 4 attempts, 4 lines superseded, complete"
    )


def test_skipped_updates_excluded_groups_and_missing_proofs_are_told(tmp_path):
    run = with_refused(
        tmp_path, {(0, 0): "excluded", (1, 0): "rejected"}, updates_per_batch=2, journalled=False
    )

    def skip_second(record):
        groups = [
            replace(g, outcome="skipped") if g.accepted and g.update == 1 else g
            for g in record.groups
        ]
        return replace(record, groups=groups, skipped_updates=[1])

    run.begin()
    run.train(skip_second)
    run.train_all()
    assert str(verify(tmp_path)) == (
        "on-policy: 3 batches, 8 groups trained, 2 of skipped updates, 1 excluded, 1 rejected, "
        "12 not journalled, complete"
    )


def test_a_pruned_journal(run):
    run.prune(2)
    verdict = verify(run.folder)
    assert verdict.on_policy and verdict.pruned == 2
    assert "journal pruned of 2 batches" in str(verdict)


def test_groups_of_an_attempt_that_died_before_it_certified_them_are_counted(tmp_path):
    """Its endpoints' confirmations went with it; nothing else is to be checked of them."""
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train()  # certified: its confirmations are known to the next attempt
    run.generate(3)
    run.begin(0)
    run.train()
    run.train()
    verdict = verify(tmp_path)
    assert (verdict.recovered, verdict.unconfirmed) == (7, 3)
    told = "3 groups of attempts that died before their endpoints' confirmations were certified"
    assert told in str(verdict)


# ---- a live run ---------------------------------------------------------------------------------


def test_a_run_that_goes_on_behind_the_certificate_that_was_read(tmp_path, monkeypatch):
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    take_all = History.take_all

    def read_and_go_on(self):
        take_all(self)
        run.train()
        metrics.write_text('{"step": 1}\n{"step": 2}\n')
        run.save(2)
        run.generate()  # of batch 2, which is open

    monkeypatch.setattr(History, "take_all", read_and_go_on)
    verdict = verify(tmp_path)
    assert verdict.on_policy and verdict.batches == 1
    monkeypatch.undo()
    verdict = verify(tmp_path)
    assert verdict.on_policy and verdict.batches == 2


@pytest.mark.parametrize("num_read", [0, 1, 4])  # groups until then: the first file has two
def test_a_journal_that_is_pruned_while_it_is_read(num_read, tmp_path, monkeypatch):
    run = CertifiedRun(tmp_path)
    run.begin(num_ranks=2)
    run.save(0)
    run.train_all()
    read_file = evidence.read_file
    numbers = itertools.count()

    def read_and_prune(file, v):
        def one_by_one():
            for record in records:
                if next(numbers) == num_read:
                    run.prune(2)
                yield record

        header, records = read_file(file, v)
        return header, one_by_one()

    monkeypatch.setattr(evidence, "read_file", read_and_prune)
    verdict = verify(tmp_path)
    assert verdict.on_policy, verdict
    assert verdict.pruned == (1 if num_read == 4 else 2)


def test_a_run_that_was_given_more_epochs(tmp_path):
    """The short batch at the end of the first epochs stays where it was."""
    run = CertifiedRun(tmp_path, epochs=1)
    run.begin()
    run.train_all()
    assert [len(batch) for batch in run.batches] == [4, 2]
    run.give_epochs(3)
    run.begin(2)
    run.train_all()
    assert [len(batch) for batch in run.batches] == [4, 2, 4, 4, 4]
    assert str(verify(tmp_path)) == (
        "on-policy: 5 batches, 18 groups trained, 2 attempts, 0 lines superseded, complete"
    )


# ---- planted: the certificate -------------------------------------------------------------------


@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_the_trainer_refuses_is_found_in_a_forged_line(name, run):
    edit, problem, _ = VIOLATIONS[name]
    run.forge_batch(1, edit)
    found = violation(run)
    assert problem in str(found)
    assert found.line == 4 and found.batch is not None


def test_a_prompt_trained_twice(run):
    trained = run.batches[0][0].key
    run.forge_batch(1, lambda record: instead_of_first(record, trained))
    found = violation(run)
    assert (found.line, found.batch, found.key) == (4, 1, trained)
    assert "it would be trained twice" in str(found)


def test_a_missing_prompt(run):
    lost = run.batches[1][2].key
    run.forge_batch(
        1,
        lambda r: replace(
            r,
            groups=[group for group in r.groups if group.key != lost],
            num_drawn=r.num_drawn - 1,
        ),
    )
    found = violation(run)
    assert (found.line, found.batch) == (4, 1)
    assert found.key == run.batches[1][3].key and "is at position 3, 2 has no group" in str(found)
    run.forge_batch(
        1,
        lambda r: replace(
            r,
            groups=[replace(group, position=i) for i, group in enumerate(r.groups)],
        ),
    )
    found = violation(run)
    assert (found.line, found.batch) == (4, 1) and "prompts are missing" in str(found)
    run.forge_batch(
        1, lambda r: replace(r, groups=[*r.groups, instead(r.groups[-1], (1, 5), 3)],
                                  num_drawn=4)  # the next batch's in its place
    )  # fmt: skip
    run.forge_batch(2, lambda r: instead_of(r, (1, 5), lost))
    found = violation(run)
    assert (found.line, found.batch, found.key) == (4, 1, lost)
    assert "is missing, it belongs to this batch" in str(found)


def test_a_prompt_that_belongs_to_a_later_batch(run):
    own, later = run.batches[1][2].key, run.batches[2][0].key

    def swap(record):
        swapped = {own: later, later: own}
        groups = []
        for group in record.groups:
            epoch, index = swapped.get(group.key, group.key)
            groups.append(replace(group, epoch=epoch, index=index))
        return replace(record, groups=groups)

    run.forge_batch(1, swap)
    run.forge_batch(2, swap)
    found = violation(run)
    assert (found.line, found.batch, found.key) == (4, 1, own)


def test_prompts_out_of_order(run):
    def turn(record):
        groups = [replace(g, position=3 - g.position) for g in reversed(record.groups)]
        return replace(record, groups=groups)

    run.forge_batch(1, turn)
    found = violation(run)
    assert (found.line, found.key) == (4, run.batches[1][-1].key)  # it is first there
    assert "is out of the dataset's order" in str(found)


def test_a_gap(run):
    run.forge(lambda records: records.pop(3))
    found = violation(run)
    assert (found.line, found.batch) == (4, 2) and "batch 1 is missing before it" in str(found)


def test_an_end_of_another_run(run):
    def edit(records):
        records[-1] = EndRecord(records[-1].weights, 2)

    run.forge(edit)
    assert "the run ended after 2 batches, 3 are certified" in str(violation(run))


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], 4, "does not follow line 3"),
        (lambda lines: [*lines[:3], lines[4], lines[3], lines[5]], 4, "does not follow line 3"),
        (lambda lines: [*lines[:3], lines[3].replace(b"one:", b"two:", 1), *lines[4:]], 4,
         "was changed after it was written"),
        (lambda lines: [*lines, lines[0]], 7, "does not follow line 6"),
        (lambda lines: lines[1:], 1, "does not follow the beginning"),
        (lambda lines: [lines[1], *lines[1:]], 1, "does not follow the beginning"),
    ],
)  # fmt: skip
def test_lines_removed_moved_edited_or_added(change, line, problem, run):
    run.write_lines(change(run.lines()))
    found = violation(run)
    assert found.line == line and problem in str(found)


def test_lines_removed_from_the_end_are_missed_in_the_metrics(run):
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    assert verify(run.folder).on_policy
    run.write_lines(run.lines()[:-2])
    found = violation(run)
    assert "metrics.jsonl: has step 3, the certificate ends with step 2" in str(found)


def test_lines_removed_from_the_end_are_missed_in_a_checkpoint(run):
    run.save(3)
    assert verify(run.folder).on_policy
    run.write_lines(run.lines()[:-2])
    found = violation(run)
    assert found.file == "checkpoints/step-3/checkpoint.json"
    assert "after 3 batches, the certificate has 2: lines were removed" in str(found)


def test_lines_removed_from_the_end_are_missed_in_the_journal(run):
    run.write_lines(run.lines()[:-2])
    assert verify(run.folder).on_policy  # batch 2 may have been open
    run.write_lines(run.lines()[:-1])
    found = violation(run)
    assert (found.batch, found.file) == (2, "journal/batch-000002/attempt0-rank0.journal")
    assert "attempt 0 was at batch 1 when it ends: lines were removed from its end" in str(found)
    path = run.folder / found.file
    path.write_bytes(path.read_bytes()[:200])  # a header, and half a group
    assert verify(run.folder).on_policy


def test_lines_that_were_lost_before_a_resume_are_trained_again(tmp_path):
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train_all()  # three batches, and the end
    run.write_lines(run.lines()[:-2])
    path = tmp_path / "journal/batch-000002/attempt0-rank0.journal"
    assert path.exists()
    run.begin(1, num_ranks=2)  # from the last checkpoint that is certified, other bits
    assert verify(tmp_path).on_policy
    run.train_all()
    assert verify(tmp_path).on_policy
    run.write_lines(run.lines()[:-3])  # of the attempt that is the last
    assert "lines were removed from its end" in str(violation(run))


def test_an_attempt_that_was_removed_is_missed_in_the_journal(tmp_path):
    """Its batches are behind none that was certified: the attempt before had come further."""
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train_all()
    run.begin(1, num_ranks=2)  # other bits
    run.train()
    assert verify(tmp_path).on_policy
    run.write_lines(run.lines()[:-2])
    found = violation(run)
    assert (found.batch, found.file) == (1, "journal/batch-000001/attempt1-rank0.journal")
    assert "attempt 1 is not in it" in str(found)


@pytest.mark.parametrize(("num_lines", "torn"), [(0, 0), (0, 50), (1, 0), (1, 50), (2, 50)])
def test_a_run_that_was_killed_before_its_first_batch_was_certified(num_lines, torn, tmp_path):
    run = CertifiedRun(tmp_path)
    run.begin()
    if num_lines == 2:
        run.generate()
    lines = run.lines()
    run.write_lines([*lines[:num_lines], lines[-1][:torn]])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    (tmp_path / "checkpoints").mkdir()
    run.save(0)
    verdict = verify(tmp_path)
    assert verdict.on_policy and verdict.batches == 0, verdict


def test_a_batch_before_any_attempt(tmp_path, run):
    batch = next(r for _, r in ChainReader(run.certificate_path) if isinstance(r, BatchRecord))
    run.write_lines([encode_line(batch, START)])
    assert "line 1, batch 0: is a batch before any attempt" in str(violation(run))


# ---- planted: the journal -----------------------------------------------------------------------

FILE = "journal/batch-000001/attempt0-rank0.journal"


def test_a_changed_sample(run):
    change_journal(run.folder / FILE, other_token, recompute=False)
    found = violation(run)
    assert (found.line, found.batch) == (4, 1)
    assert FILE in str(found) and "byte" in str(found) and "changed" in str(found)


def test_a_changed_sample_with_its_checksum(run):
    change_journal(run.folder / FILE, other_token, recompute=True)
    found = violation(run)
    assert (found.line, found.batch) == (4, 1)
    assert (found.file, found.key) == (FILE, run.batches[1][0].key)
    assert "the journal was changed" in str(found)


def test_a_cut_off_record_that_was_trained(run):
    path = run.folder / FILE
    path.write_bytes(path.read_bytes()[:-9])
    found = violation(run)
    assert (found.line, found.batch, found.key) == (4, 1, run.batches[1][-1].key)
    assert "its record" in str(found) and "is not in the journal" in str(found)


def test_a_batch_that_was_removed_from_the_middle_of_the_journal(run):
    shutil.rmtree(run.folder / "journal/batch-000001")
    found = violation(run)
    assert (found.line, found.batch) == (4, 1) and "goes back to batch 0" in str(found)


KEEP_ALL, RESUMABLE = "journal:\n  keep: all\n", "journal:\n  keep: resumable\n"


@pytest.mark.parametrize(
    ("saved", "configs", "removed", "batch", "problem"),
    [
        ([], [], [0, 1, 2], 0, "and there is none"),
        ([], [], [0], 0, "and there is none"),
        ([1, 2], [], [0, 1, 2], 1, "checkpoints/step-1/checkpoint.json goes on from batch 1"),
        ([1, 2], [RESUMABLE], [0, 1], 1, "goes on from batch 1"),
        ([2], [KEEP_ALL], [0], 0, "with journal.keep=all none is ever removed"),
        ([2], [KEEP_ALL, KEEP_ALL], [0], 0, "with journal.keep=all"),
        ([1, 2], [RESUMABLE], [0], None, "journal pruned of 1 batch,"),
        ([2], [KEEP_ALL, RESUMABLE], [0, 1], None, "journal pruned of 2 batches"),
    ],
)
def test_a_journal_that_was_removed(saved, configs, removed, batch, problem, run):
    for closed_batches in saved:
        run.save(closed_batches, keep=2)
    for attempt, config in enumerate(configs):
        (run.folder / f"config-attempt{attempt}.yaml").write_text(config)
    for v in removed:
        shutil.rmtree(run.folder / f"journal/batch-{v:06d}")
    verdict = verify(run.folder)
    assert problem in str(verdict)
    if batch is None:
        assert verdict.on_policy
    else:
        assert (verdict.violation.batch, verdict.violation.line) == (batch, 3 + batch)


def test_a_damaged_checkpoint_holds_no_journal(run):
    """As when the run itself looks for its oldest one."""
    run.save(0, keep=2)
    run.save(2, keep=2)
    shutil.rmtree(run.folder / "journal/batch-000000")
    assert violation(run).batch == 0
    file = run.folder / "checkpoints/step-0/checkpoint.json"
    file.write_bytes(file.read_bytes().replace(b'"step": 0', b'"step": 1', 1))
    assert verify(run.folder).on_policy


def with_pushed_weights(prompt, served):
    """One prompt's group of batch 1 has tokens of other weights in its first response."""
    group = finished_group(prompt, served)
    return with_span(group, f"{RUN}:0:2", 2, 4) if prompt.key == PUSHED else group


finished_group = certified_run.finished_group
PUSHED = (0, 5)


def test_weights_pushed_during_the_batch(tmp_path, monkeypatch):
    """The trainer refuses it; a trainer that did not look is found out by the journal."""
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train()
    monkeypatch.setattr(certified_run, "finished_group", with_pushed_weights)
    with pytest.raises(CertificateError, match=f"tokens of version {RUN}:0:2"):
        run.certificate.check(record := run.generate(), whole=True)
    run.certificate.close_batch(
        replace(record, groups=[replace(g, stamped=[f"{RUN}:0:1"]) for g in record.groups])
    )
    found = violation(run)
    assert (found.line, found.batch, found.key, found.file) == (4, 1, PUSHED, FILE)
    assert f"response 0: tokens 2 to 4 are of version {RUN}:0:2" in str(found)
    run.forge_batch(1, lambda _: replace(record, accepted_versions=[f"{RUN}:0:1"]))
    found = violation(run)
    assert (found.line, found.key) == (4, PUSHED)


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([(0, 3), (4, 5)], "response 1: token 3 has no version or two"),
        ([(0, 3), (2, 5)], "response 1: token 2 has no version or two"),
        ([(0, 4)], "response 1: 5 tokens, the versions cover 4"),
    ],
)
def test_a_token_without_its_one_version(spans, problem, tmp_path, monkeypatch):
    def stamped_in_part(prompt, served):
        group = finished_group(prompt, served)
        stamped = tuple(VersionSpan(str(served.version), *span) for span in spans)
        last = dataclasses.replace(group.completions[1], version_spans=stamped)
        return dataclasses.replace(group, completions=(group.completions[0], last))

    monkeypatch.setattr(certified_run, "finished_group", stamped_in_part)
    run = CertifiedRun(tmp_path)
    run.begin()
    run.train()
    assert problem in str(violation(run))


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda r: replace(r, weights="0" * 64), "weights: 0000"),
        (lambda r: replace(r, groups=[
            replace(g, endpoints=["http://two:8000"]) for g in r.groups]), "endpoints: "),
        (lambda r: replace(r, groups=[
            replace(g, reason="flat") for g in r.groups]), "reason: flat in the certificate"),
        (lambda r: replace(r, groups=[
            replace(g, recovered=True) for g in r.groups]), "recovered: True in the certificate"),
        (lambda r: replace(r, groups=[
            replace(g, digest=r.groups[0].digest) for g in r.groups]), "trained was"),
    ],
)  # fmt: skip
def test_the_journal_does_not_bear_out_the_line(edit, problem, run):
    run.forge_batch(1, edit)
    found = violation(run)
    assert (found.line, found.batch, found.file) == (4, 1, FILE)
    assert problem in str(found)


def withdrawal_of(endpoint: str, proof: int) -> bytes:
    return encode(WithdrawalRecord(endpoint, proof, restart=0))


def test_a_withdrawn_record_is_no_evidence_of_what_was_trained(run):
    """Its endpoint failed a proof: all that it made until then, of that rank in that attempt."""
    withdrawal = withdrawal_of(URLS[1], 0)
    made = next(p.key for p in run.batches[1] if URLS[p.index % 2] == URLS[1])
    append_to_journal(run.folder / FILE, withdrawal_of("http://three:8000", 0))
    append_to_journal(run.folder / FILE, withdrawal_of(URLS[1], 1))  # later ones
    assert verify(run.folder).on_policy
    append_to_journal(run.folder / FILE, withdrawal)
    found = violation(run)
    assert (found.line, found.batch, found.file) == (4, 1, FILE)
    assert (found.key, found.endpoint) == (made, URLS[1])
    assert "was withdrawn: its endpoint failed a proof" in str(found)


def test_what_one_rank_withdrew_another_was_not_told_of(tmp_path):
    """The other one's groups of that endpoint are in doubt too, as when a run is resumed."""
    run = CertifiedRun(tmp_path)
    run.begin(num_ranks=2)
    run.train_all()
    folder = run.journal_path / "batch-000001"
    made = {p.key: rank % 2 for rank, p in enumerate(run.batches[1]) if p.index % 2}
    withdrawal = withdrawal_of(URLS[1], 9)  # nothing of its own
    append_to_journal(folder / "attempt0-rank0.journal", withdrawal)
    found = violation(run)
    assert made[found.key] == 1 and found.file.endswith("attempt0-rank1.journal")
    append_to_journal(folder / "attempt0-rank1.journal", withdrawal)  # it was told
    assert verify(tmp_path).on_policy


def test_groups_that_were_generated_again_after_a_withdrawal_are_evidence(tmp_path):
    run = CertifiedRun(tmp_path)
    run.begin()
    withdrawn = run.generate()  # of batch 0
    path = run.journal_path / "batch-000000" / "attempt0-rank0.journal"
    append_to_journal(path, withdrawal_of(URLS[1], 0))
    run.begin(0)
    run.train_all()
    again = [p.key for p in run.batches[0] if p.index % 2]
    verdict = verify(tmp_path)
    assert verdict.on_policy, verdict
    assert (verdict.recovered, verdict.discarded) == (4 - len(again), len(again)) == (2, 2)
    digests = {group.key: group.digest for group in withdrawn.groups}
    run.forge_batch(0, lambda r: replace(r, groups=[
        replace(g, digest=digests[g.key], recovered=True, stamped=[f"{RUN}:0:0"])
        for g in r.groups], discarded=[]))  # fmt: skip
    found = violation(run)
    assert found.key in again and "was withdrawn" in str(found)


def test_what_a_later_attempt_withdrew_of_an_earlier_one_is_no_evidence(tmp_path):
    """Its log-probabilities were found out when the journalled groups were trained."""
    run = CertifiedRun(tmp_path)
    run.begin()
    run.generate()  # of batch 0, and killed
    run.begin(0)
    run.train_all()
    assert verify(tmp_path).recovered == 4
    certified = History(run.certificate_path)
    certified.take_all()
    weights = certified.batch(0).weights

    def withdraw(digest: str) -> None:
        served = ServedWeights(PolicyVersion(RUN, 1, 0), digest)
        with closing(Journal(run.journal_path, 1, 0, "never").open_batch(served)) as batch:
            batch.withdraw(URLS[1], EVER)

    withdraw("other")
    assert verify(tmp_path).on_policy  # groups of those weights are not these
    (run.journal_path / "batch-000000" / "attempt1-rank0.journal").unlink()
    withdraw(weights)
    found = violation(run)
    assert found.endpoint == URLS[1] and "was withdrawn" in str(found)
    assert found.file.endswith("attempt0-rank0.journal")


def test_batches_whose_log_probabilities_are_not_judged_are_counted(tmp_path):
    run = CertifiedRun(tmp_path, agreement_limit=None)
    run.begin()
    far = [EndpointAgreement(URLS[0], 1000, 4.2, 9.0)]
    run.train(lambda record: replace(record, agreement=far))
    run.train_all()
    verdict = verify(tmp_path)
    assert verdict.on_policy and verdict.unjudged == 3
    assert "3 batches with log-probabilities not judged" in str(verdict)


# ---- any history --------------------------------------------------------------------------------

ATTEMPTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # closed batches that were after the last checkpoint
        st.integers(1, 2),  # ranks
        st.integers(0, 3),  # batches until the kill
        st.one_of(st.none(), st.integers(0, 2)),  # groups of each rank of the open batch
        st.integers(0, 400),  # bytes of the line being written
    ),
    min_size=1,
    max_size=5,
)

REFUSED = st.dictionaries(
    st.tuples(st.integers(0, 1), st.integers(0, 6)), st.sampled_from(["rejected", "excluded"])
)


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """Nothing here goes down with the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    attempts=ATTEMPTS,
    updates=st.integers(1, 2),
    refused=REFUSED,
    max_draws=st.none() | st.integers(2, 4),
    completes=st.booleans(),
    data=st.data(),
)
def test_any_history_of_kills_is_on_policy_and_any_changed_byte_is_found(
    attempts, updates, refused, max_draws, completes, data
):
    with tempfile.TemporaryDirectory() as folder:
        run = CertifiedRun(
            Path(folder),
            num_prompts=7,
            batch_size=2,
            epochs=2,
            updates_per_batch=updates,
            refused=refused,
            max_draws=max_draws,
        )
        effective: list[int] = []  # of each batch in the weights, the attempt that trained it
        superseded = 0
        for attempt, (back, num_ranks, num_batches, num_open, torn) in enumerate(attempts):
            first = max(0, len(effective) - back)
            superseded += len(effective) - first
            del effective[first:]
            run.begin(first, num_ranks)
            for _ in range(min(num_batches, len(run.batches) - first)):
                run.train()
                effective.append(attempt)
            if run.next_batch < len(run.batches):
                if num_open is not None:
                    run.generate(num_open)
                line = run.lines()[-1][:torn].rstrip(b"\n")
                if line != run.lines()[-1][:-1]:
                    run.write_lines([*run.lines(), line])
            run.certificate.close()
        if completes:
            run.begin(len(effective))
            run.train_all()
            effective += [len(attempts)] * (len(run.batches) - len(effective))
        verdict = verify(run.folder)
        assert verdict.on_policy, verdict
        assert verdict.batches == len(effective) and verdict.superseded == superseded
        drawn = [prompt.key for batch in run.batches[: len(effective)] for prompt in batch]
        outcomes = [refused.get(key, "trained") for key in drawn]
        assert verdict.trained == outcomes.count("trained")
        assert verdict.rejected == outcomes.count("rejected")
        assert verdict.excluded == outcomes.count("excluded")
        assert verdict.attempts == len(attempts) + completes and verdict.ended == completes

        whole = [line for line in run.lines() if line.endswith(b"\n")]
        number = data.draw(st.integers(0, len(whole) - 1), label="line")
        place = data.draw(st.integers(0, len(whole[number]) - 1), label="byte")
        flipped = data.draw(st.integers(1, 255), label="flipped bits")
        lines = run.lines()
        changed = bytearray(lines[number])
        changed[place] ^= flipped
        run.write_lines([*lines[:number], bytes(changed), *lines[number + 1 :]])
        assert violation(run).line == number + 1


# ---- the command --------------------------------------------------------------------------------


def test_the_command_tells_and_exits_by_what_it_found(run, tmp_path_factory):
    def call(folder):
        return CliRunner().invoke(command_line(), ["verify", str(folder)])

    good = call(run.folder)
    first, weights, chain = good.stdout.splitlines()
    assert (good.exit_code, first) == (0, "on-policy: 3 batches, 12 groups trained, complete")
    assert weights.startswith(f"weights: {3 * len(URLS)} answers to a nonce, {3 * len(URLS)} not")
    assert chain.startswith(f"certificate {chain_hash(run.certificate_path)} ")
    change_journal(run.folder / FILE, other_token, recompute=True)
    bad = call(run.folder)
    assert bad.exit_code == 1
    key = run.batches[1][0].key
    where = f"certificate.jsonl line 4, {FILE}, batch 1, prompt {key[1]} of epoch {key[0]}: "
    assert bad.stdout.startswith("NOT on-policy: " + where)
    empty = tmp_path_factory.mktemp("empty")
    for folder in (empty, empty / "not-there"):
        none = call(folder)
        assert none.exit_code == 2 and "has no certificate.jsonl" in none.stderr


RECIPE = """
from dataclasses import dataclass
from easyrl.recipes import GRPO

@dataclass(frozen=True)
class Mine(GRPO):
    def accepts(self, group, run):
        return None
"""


def test_the_decisions_of_a_recipe_that_was_changed_since_are_not_replayed(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(RECIPE)
    config = validate_config(
        {
            "model": {"path": "models/tiny"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"name": "Mine", "file": str(recipe), "kl_coef": 1e-3},
        }
    )

    def verified(name, digest):
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            run = CertifiedRun(folder, recipe=digest)
            run.begin()
            run.train_all()
            (folder / "config-attempt0.yaml").write_text(dump_config(config))
        return CliRunner().invoke(command_line(), ["verify", str(folder)])

    then = recipe_digest(config)
    sound = verified("run", then)
    assert sound.exit_code == 0 and "12 decisions replayed" in sound.stdout, sound.output
    recipe.write_text(RECIPE.replace("return None", "return 'flat' or None"))
    now = recipe_digest(config)
    changed = verified("run", then)
    assert changed.exit_code == 2 and now != then
    assert f"{recipe}: the recipe of attempt 0 was {then} when it began and is {now} now" in (
        changed.stderr
    )
    assert "12 decisions replayed" in verified("of-an-earlier-version", None).stdout
    recipe.unlink()
    gone = verified("run", then)
    assert gone.exit_code == 0 and "its recipe's decisions are not checked" in gone.stdout


# ---- the model below adapters --------------------------------------------------------------------


def with_bases(folder, asked_again):
    """A run of 20 batches whose endpoints are asked about the model below in ``asked_again``."""
    run = CertifiedRun(folder, epochs=None, num_batches=20, adapters=True)
    run.begin()
    last = 0
    for v in range(20):
        last = v if v in asked_again else last

        run.train(partial(with_base, last))
    run.certificate.close()
    return run


def with_base(asked, record):
    """With the model below adapters asked about in batch ``asked``."""
    base = WeightProof(f"{asked:064x}", 3, 1, f"{asked + 1:064x}", whole=True)
    confirmations = [dataclasses.replace(c, base=base) for c in record.confirmations]
    return replace(record, confirmations=confirmations)


def test_how_old_an_answer_about_the_model_below_may_be(tmp_path):
    verdict = verify(with_bases(tmp_path, {0, 10, 15}).folder)
    assert verdict.on_policy and verdict.base_age == 9
    assert verdict.proofs_told.endswith("was proved in the batch or up to 9 batches before")


def test_one_that_is_repeated_for_too_long_is_refused(tmp_path):
    error = violation(with_bases(tmp_path, {2}))
    assert (error.batch, error.endpoint) == (19, URLS[0])
    assert "proved the model below its adapter 17 batches before, which holds for 16" in str(error)


def test_whole_models_have_no_such_answer(run):
    assert verify(run.folder).base_age is None


@pytest.mark.parametrize(
    ("adapters", "edit", "problem"),
    [
        (True, lambda record: record, "proved an adapter, and not the model below it"),
        (
            False,
            partial(with_base, 0),
            "proved the model below an adapter, which the batch's weights do not have",
        ),
    ],
    ids=["without the model", "without an adapter"],
)
def test_the_model_below_is_proved_with_an_adapter_and_with_nothing_else(
    tmp_path, adapters, edit, problem
):
    run = CertifiedRun(tmp_path, epochs=None, num_batches=2, adapters=adapters)
    run.begin()
    with pytest.raises(CertificateError, match=problem):
        run.train(edit)
    run.certificate.close()


def test_an_answer_about_the_model_below_is_of_its_own_attempt(tmp_path):
    run = CertifiedRun(tmp_path, epochs=None, num_batches=4, adapters=True)
    run.begin()
    run.train(partial(with_base, 0))
    run.certificate.close()
    run.begin(first_batch=1)
    with pytest.raises(CertificateError, match="with a nonce of attempt 0"):
        run.train(partial(with_base, 0))
    run.certificate.close()
    run.begin(first_batch=1)
    run.train(partial(with_base, 1))
    run.certificate.close()
