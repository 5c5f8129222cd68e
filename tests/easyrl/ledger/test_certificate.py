"""The certificate's chain of lines, and what the trainer is refused by it."""

import errno
import functools
import os
import re
import resource

import msgspec
import pytest
from blake3 import blake3

from easyrl.ledger.certificate.chain import ChainReader, chain_hash
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, EndRecord, RunRecord
from easyrl.ledger.verify import verify
from easyrl.schema import GroupOutcome
from tests.easyrl.ledger.certificate_violations import VIOLATIONS, first_group, instead_of_first
from tests.easyrl.ledger.certified_run import (
    RUN,
    URLS,
    CertifiedRun,
    change_journal,
    finished_group,
    other_token,
    with_refused,
    with_span,
)

replace = msgspec.structs.replace


@pytest.fixture
def run(tmp_path):
    """In its first attempt, batch 0 is certified."""
    started = CertifiedRun(tmp_path)
    started.begin()
    started.train()
    yield started
    started.certificate.close()


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_refused_before_the_step_and_not_written(name, run):
    edit, problem, named = VIOLATIONS[name]
    sound = run.generate()
    wrong = edit(sound)
    before = run.certificate_path.read_bytes()
    check = functools.partial(run.certificate.check, whole=True)
    for refused in (check, run.certificate.close_batch):
        with pytest.raises(CertificateError) as caught:
            refused(wrong)
        assert problem in str(caught.value)
        assert caught.value.batch == wrong.batch and caught.value.line is None
        if "key" in named:
            assert (
                caught.value.key == wrong.groups[0].key or caught.value.key == sound.groups[0].key
            )
        if "last" in named:
            assert caught.value.key == wrong.groups[-1].key
        if "endpoint" in named:
            assert caught.value.endpoint == URLS[0]
    assert run.certificate_path.read_bytes() == before
    run.certificate.check(sound, whole=True)
    run.certificate.close_batch(sound)


def test_a_prompt_of_an_earlier_batch_is_refused(run):
    trained = run.batches[0][0].key
    with pytest.raises(CertificateError, match="is in batch 0 already: it would be trained twice"):
        run.certificate.check(instead_of_first(run.generate(), trained), whole=True)


def test_the_updates_until_now_can_be_checked(tmp_path):
    """Before the batch is whole: refused groups, and groups of later updates, come later."""
    run = with_refused(tmp_path, {(0, 1): "rejected"}, updates_per_batch=2)
    certificate = run.begin()
    whole = run.generate()
    first = replace(whole, num_updates=1, groups=[g for g in whole.groups
                                                  if g.accepted and g.update == 0])  # fmt: skip
    assert [group.position for group in first.groups] == [0, 2]
    certificate.check(first, whole=False)
    certificate.check(whole, whole=True)
    with pytest.raises(CertificateError, match="update 0 has 1 groups, it takes 2"):
        certificate.check(replace(first, groups=first.groups[1:]), whole=False)
    for missing in (first, replace(whole, groups=whole.groups[1:])):
        with pytest.raises(CertificateError, match="has . groups and 5 drawn prompts"):
            certificate.check(missing, whole=True)
        with pytest.raises(CertificateError, match="has . groups and 5 drawn prompts"):
            certificate.close_batch(missing)
    certificate.close()


def test_an_update_that_ends_in_the_next_epoch_is_checked_before_the_batch_is_whole(tmp_path):
    """Seven of ten prompts are drawn; the first update ends in the next epoch."""
    places = {(0, 0): "rejected", (0, 1): "rejected", (0, 2): "rejected"}
    places |= {(1, 0): "rejected", (1, 1): "rejected"}
    options = {"num_prompts": 10, "epochs": None, "num_batches": 2, "updates_per_batch": 2}
    run = with_refused(tmp_path, places, **options)
    certificate = run.begin()
    run.train()
    whole = run.generate()
    first = [group for group in whole.groups if group.accepted and group.update == 0]
    assert [(group.position, group.epoch) for group in first] == [(2, 0), (3, 1)]
    certificate.check(replace(whole, num_updates=1, groups=first), whole=False)
    certificate.check(whole, whole=True)
    certificate.close()


def test_a_group_of_another_update_than_its_number_among_the_accepted_gives_it(tmp_path):
    run = with_refused(tmp_path, {(0, 1): "rejected"}, updates_per_batch=2)
    certificate = run.begin()
    whole = run.generate()
    assert [group.update for group in whole.groups if group.accepted] == [0, 0, 1, 1]
    assert [group.position for group in whole.groups if group.accepted] == [0, 2, 3, 4]
    for position, update, number in ((2, 1, 1), (3, 0, 2)):
        groups = [replace(g, update=update) if g.position == position else g for g in whole.groups]
        problem = f"is of update {update}; accepted group number {number} belongs to update"
        with pytest.raises(CertificateError, match=problem) as caught:
            certificate.check(replace(whole, groups=groups), whole=True)
        assert caught.value.key == run.batches[0][position].key
    certificate.close()


def test_spans_of_a_push_during_the_batch_are_in_the_groups_entry(run):
    prompt = run.batches[1][0]
    pushed = with_span(finished_group(prompt, run.served()), f"{RUN}:0:2", 1, 3)
    entry = GroupOutcome.of(pushed)
    assert entry.stamped == [f"{RUN}:0:1", f"{RUN}:0:2"]
    assert entry.endpoints == [URLS[prompt.index % 2]] and entry.key == prompt.key


# ---- attempts ------------------------------------------------------------------------------------


def test_a_later_attempt_may_train_journalled_groups_of_the_same_weights_only(run):
    run.generate(2)  # of batch 1, then killed
    run.begin(1)
    record = run.generate()
    assert record.accepted_versions == [f"{RUN}:0:1", f"{RUN}:1:1"]
    assert sum(group.recovered for group in record.groups) == 2
    run.certificate.check(record, whole=True)
    generated = next(group for group in record.groups if not group.recovered)
    posing = [replace(g, stamped=[f"{RUN}:0:1"]) if g is generated else g for g in record.groups]
    with pytest.raises(CertificateError, match=f"has tokens of version {RUN}:0:1"):
        run.certificate.check(replace(record, groups=posing), whole=True)


def test_a_changed_sample_of_a_batch_that_was_trained_before_is_refused(run):
    run.train()  # batch 1, then killed; its checkpoint was of batch 0
    path = run.journal_path / "batch-000001/attempt0-rank0.journal"
    change_journal(path, other_token, recompute=True)
    run.begin(1)
    changed = run.batches[1][0].key
    with pytest.raises(CertificateError, match="the journal was changed") as caught:
        run.certificate.check(run.generate(), whole=True)
    assert caught.value.key == changed and caught.value.batch == 1


def test_versions_of_other_weights_cannot_be_accepted(run):
    run.train()
    run.begin(1, num_ranks=2)  # comes to other bits
    record = run.generate()
    assert record.discarded == sorted(prompt.key for prompt in run.batches[1])
    run.certificate.check(record, whole=True)
    accepting = replace(record, accepted_versions=[f"{RUN}:0:1", *record.accepted_versions])
    with pytest.raises(CertificateError, match=f"accepts version {RUN}:0:1, whose weights were"):
        run.certificate.check(accepting, whole=True)


def test_endpoints_of_an_attempt_that_certified_the_batch_must_have_confirmed_it(run):
    run.train()
    run.begin(1)
    record = run.generate()
    assert all(group.recovered for group in record.groups)
    run.certificate.check(
        replace(record, confirmations=[]), whole=True
    )  # nobody was asked for anything now
    with pytest.raises(CertificateError, match="had not confirmed") as caught:
        run.certificate.check(first_group(record, endpoints=["http://three:8000"]), whole=True)
    assert caught.value.endpoint == "http://three:8000"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda run: replace(run, data="0ther"),
            "data was 'da7a' when the run began and is '0ther' now; put back data.* and the files "
            "that it names, as they were, or start a new run",
        ),
        (
            lambda run: replace(run, seed=2),
            "line 1: seed was 1 when the run began and is 2 now; put back run.seed=1, or start a "
            "new run in another folder",
        ),
        (
            lambda run: replace(run, shuffle=False, batch_size=8, num_prompts=9),
            "; put back data.shuffle=true, put back trainer.batch_size=4, put back data.* and",
        ),
        (
            lambda run: replace(run, run="other"),
            "run was 'small-1234abcd' when the run began and is 'other' now; start a new run",
        ),
    ],
)
def test_another_run_cannot_go_on(run, change, problem):
    run.run = change(run.run)
    before = run.certificate_path.read_bytes()
    with pytest.raises(CertificateError, match=re.escape(problem)) as caught:
        run.begin(1)
    assert "restore the file" not in str(caught.value)  # nothing is wrong with it
    assert run.certificate_path.read_bytes() == before


def test_an_attempt_needs_its_place(run):
    with pytest.raises(CertificateError, match="starts at batch 2, but only 1 are certified"):
        run.begin(2)
    run.attempt = -1  # the count of attempts was lost
    with pytest.raises(CertificateError, match="is attempt 0 after attempt 0"):
        run.begin(1)


def test_epochs_and_updates_may_change(run):
    run.epochs, run.updates_per_batch, run.max_draws = 5, 2, 4
    run.begin(1)
    run.train()


# ---- the file -----------------------------------------------------------------------------------


def test_lines_are_json_with_kinds_and_a_chain(run):
    run.train_all()
    lines = [msgspec.json.decode(line) for line in run.lines()]
    assert [line["kind"] for line in lines] == ["run", "attempt", "batch", "batch", "batch", "end"]
    assert len({line["previous"] for line in lines}) == len(lines)
    batch = lines[3]
    assert batch["weights"] and batch["groups"][0]["digest"] and batch["confirmations"][0]["url"]
    types = [type(record) for _, record in ChainReader(run.certificate_path)]
    assert types[:2] == [RunRecord, AttemptRecord] and types[-1] is EndRecord


def test_a_torn_last_line_is_dropped(run):
    whole = run.certificate_path.read_bytes()
    run.train()
    line = run.lines()[-1]
    for size in (1, 40, len(line) - 1):
        run.certificate_path.write_bytes(whole + line[:size])
        run.begin(1).close()
        lines = run.lines()
        assert b"".join(lines).startswith(whole) and lines[-1].startswith(b'{"previous":')
        assert msgspec.json.decode(lines[-1])["kind"] == "attempt"


@pytest.mark.parametrize("torn", [0, 1, 100])
def test_an_attempt_that_died_while_it_wrote_its_first_line(tmp_path, torn):
    run = CertifiedRun(tmp_path)
    run.begin().close()
    run.write_lines([run.lines()[0][:torn]])
    run.begin().close()
    kinds = [msgspec.json.decode(line)["kind"] for line in run.lines()]
    assert kinds == ["run", "attempt"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines[:1] + lines[2:], 2),  # removed
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),  # moved
        (lambda lines: [*lines, lines[-1]], 5),  # added
        (lambda lines: [*lines[:2], lines[2].replace(b'"step":1', b'"step":9'), lines[3]], 3),
        (lambda lines: [*lines[:3], lines[3][:-1] + b"x"], 4),  # its end
        (lambda lines: [*lines[:3], lines[3][:-1] + b"x" + lines[3][:50]], 4),  # and a torn one
        (lambda lines: [*lines, b"{}\n"], 5),
    ],
)
def test_a_broken_chain_is_not_gone_on_with(run, change, line):
    run.train()
    run.write_lines(change(run.lines()))
    before = run.certificate_path.read_bytes()
    with pytest.raises(CertificateError, match=f"certificate.jsonl line {line}: .*restore the"):
        run.begin(1)
    assert run.certificate_path.read_bytes() == before


OLD_LINES = (  # of format 1, without ``previous`` and ``digest``
    b'"kind":"run","run":"small-1234abcd","seed":1,"shuffle":true,"epochs":2,"num_prompts":6,'
    b'"batch_size":4,"updates_per_batch":1,"data":"da7a","format":1',
    b'"kind":"attempt","attempt":0,"num_ranks":1,"first_batch":0,"reason":"start","epochs":2,'
    b'"updates_per_batch":1',
)


def test_a_certificate_of_an_earlier_format_names_the_commit_that_read_it(tmp_path):
    run = CertifiedRun(tmp_path)
    previous = "0" * 32
    for content in OLD_LINES:
        body = b'{"previous":"%s",' % previous.encode() + content
        digest = blake3(body).hexdigest(length=16)
        line = body + b',"digest":"%s"}' % digest.encode()
        previous = blake3(line).hexdigest(length=16)
        with run.certificate_path.open("ab") as file:
            file.write(line + b"\n")
    before = run.certificate_path.read_bytes()
    told = "certificate.jsonl line 1: was written in format 1.*commit e7cfbd6 is the last that"
    with pytest.raises(CertificateError, match=told):
        run.begin()
    assert run.certificate_path.read_bytes() == before
    assert re.search(told, str(verify(tmp_path)))


def test_the_hash_that_trackers_are_told_is_of_a_line_that_is_there(run):
    size = run.certificate_path.stat().st_size
    before = chain_hash(run.certificate_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # a part of the line fits
    try:
        with pytest.raises(OSError, match="make room"):
            run.certificate.close_batch(run.generate())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.certificate.chain_hash == before == chain_hash(run.certificate_path)
    assert run.certificate_path.stat().st_size == size


def test_a_full_disk_leaves_nothing_behind_that_counts(run, monkeypatch):
    record = run.generate()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left.* make room .* --resume") as caught:
            run.certificate.close_batch(record)
    assert caught.value.filename == str(run.certificate_path)
    assert caught.value.errno == errno.ENOSPC
    assert run.certificate.chain_hash == chain_hash(run.certificate_path)
    with pytest.raises(ValueError, match="closed file"):  # nothing goes behind half a line
        run.certificate.end("")
    run.begin(1)
    run.train()
