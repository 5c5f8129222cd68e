"""What a journal keeps over the end of a process, and what it refuses."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from easyrl.completion_check import CompletionLimits
from easyrl.config import Config
from easyrl.ledger.journal.batch import Journal, Production, group_settings
from easyrl.ledger.journal.codec import decode_record
from easyrl.ledger.journal.record_file import JournalError, RecordWriter, read_record, read_records
from easyrl.schema import BatchWithdrawn, Exclusion
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    URL,
    WEIGHTS,
    contents,
    group,
    journal,
    prompt,
    read,
    served,
    write,
)

ROOT = Path(__file__).parents[3]


def test_a_group_comes_back_to_the_bit_in_the_next_attempt(tmp_path):
    made = group(2)
    first = journal(tmp_path).open_batch(served(0))
    added, stored = first.add(made)
    assert contents(added) == contents(made)
    again = stored.load()
    assert contents(again) == contents(made) and again.digest == added.digest
    assert (again.dispatched_s, again.completed_s) == (made.dispatched_s, made.completed_s)
    # the process is killed here: nothing is closed
    second = journal(tmp_path, attempt=1).open_batch(served(1))
    found = second.find(made.prompt)
    assert found is not None and found.num_tokens == stored.num_tokens == 4 + 2 + 15
    recovered = found.load()
    assert contents(recovered) == contents(made)
    assert recovered.digest == added.digest and len(added.digest) == 32
    assert recovered.prompt is made.prompt  # with text and answer
    assert second.find(prompt(5)) is None
    assert second.accepted_versions == {"run:0:3", "run:1:3"} and second.discarded == frozenset()


def test_an_excluded_group_is_kept_as_one(tmp_path):
    made = replace(
        group(1),
        completions=(),
        scores=(),
        excluded=Exclusion("refused", "300 tokens leave no room"),
    )
    write(tmp_path, [made])
    found = journal(tmp_path, attempt=1).open_batch(served(1)).find(made.prompt)
    assert contents(found.load()) == contents(made)


def test_a_rejected_group_is_kept_with_its_reason(tmp_path):
    made = replace(group(1), rejected="all rewards are equal")
    write(tmp_path, [group(0), made])
    batch = journal(tmp_path, attempt=1).open_batch(served(1))
    assert batch.find(made.prompt).refused and not batch.find(prompt(0)).refused
    again = batch.find(made.prompt).load()
    assert contents(again) == contents(made) and again.refused == "all rewards are equal"


# ---- responses that cannot be trained ------------------------------------------------------------

LIMITS = CompletionLimits(vocab_size=2**31, max_tokens=9)


def spoilt(made, **fields):
    """``made`` with an array of its second response replaced."""
    one, two, *others = made.completions
    return replace(made, completions=(one, replace(two, **fields), *others))


def with_value(array, value):
    """A copy of ``array`` with its last item replaced."""
    return np.append(array[:-1], np.array(value, array.dtype))


def poison(index):
    """Group ``index`` as it may not be trained, and what is said of it, in all ways."""
    made = group(index, lengths=(5, 3, 9))
    two = made.completions[1]
    span = two.version_spans[0]
    yield spoilt(made, token_ids=with_value(two.token_ids, -1)), r"token_ids\[2\] is -1"
    for value, said in ((0.5, "above 0"), (np.nan, "not a number"), (-np.inf, "not a number")):
        yield spoilt(made, logprobs=with_value(two.logprobs, value)), rf"logprobs\[2\] .*{said}"
    yield spoilt(made, logprobs=two.logprobs[:-1]), "differ in length"
    yield spoilt(made, version_spans=(span._replace(end=2),)), "do not cover 3 tokens"
    yield group(index, lengths=(5, 10, 9)), "10 tokens, max_tokens is 9"
    yield spoilt(made, finish_reason="abort"), "finish_reason is 'abort'"


def checked(directory, attempt, rank=0, limits=LIMITS, **fields):
    return replace(journal(directory, attempt, rank), limits=limits, **fields)


@pytest.mark.parametrize("number", range(len(list(poison(2)))))
def test_a_group_of_the_open_batch_that_cannot_be_trained_is_drawn_again(tmp_path, number, caplog):
    bad, said = list(poison(2))[number]
    path = write(tmp_path, [group(1), bad, group(3)])
    before = path.read_bytes()
    events = []
    record = lambda event, **fields: events.append((event, fields))  # noqa: E731
    batch = checked(tmp_path, 1, record=record).open_batch(served(1))
    assert batch.find(bad.prompt) is None and batch.discarded == {bad.prompt.key}
    assert contents(batch.find(prompt(3)).load()) == contents(group(3))
    ((event, fields),) = events
    assert event == "record_dropped" and (fields["epoch"], fields["index"]) == bad.prompt.key
    for text in (fields["problem"], caplog.text):
        assert re.search(f"response 1, of {URL}: .*{said}", text), text
    assert str(path) in caplog.text and "prompt 2 of epoch 1" in caplog.text
    batch.add(group(2, "run:1:3"))  # the same seed may give what can be
    batch.close()
    assert path.read_bytes() == before  # it stays as evidence
    caplog.clear()
    third = checked(tmp_path, 2).open_batch(served(2))
    assert "drawn again" not in caplog.text
    assert contents(third.find(bad.prompt).load()) == contents(group(2, "run:1:3"))
    assert third.discarded == frozenset()


def test_a_token_outside_the_policys_vocabulary_cannot_be_trained(tmp_path, caplog):
    made = group(2, lengths=(5, 3, 9))
    ids = made.completions[1].token_ids
    tokens = [replace(c, token_ids=c.token_ids % 100) for c in made.completions]
    tokens[1] = replace(tokens[1], token_ids=with_value(ids % 100, 100))
    write(tmp_path, [replace(made, completions=tuple(tokens))])
    for vocab_size, is_there in ((101, True), (100, False)):
        limits = CompletionLimits(vocab_size)
        batch = checked(tmp_path, 1, limits=limits).open_batch(served(1))
        assert (batch.find(made.prompt) is not None) == is_there
    assert "token_ids[2] is 100, the policy's vocabulary has ids 0 to 99" in caplog.text


def test_a_response_that_ends_where_none_does_cannot_be_trained(tmp_path, caplog):
    made = group(2, lengths=(5, 3, 9))  # the last is longer than it might be: "length"
    ends = frozenset(int(c.token_ids[-1]) for c in made.completions if not c.truncated)
    write(tmp_path, [made])
    for end_ids, is_there in ((ends, True), (frozenset(sorted(ends)[1:]), False)):
        limits = CompletionLimits(2**31, end_ids=end_ids)
        batch = checked(tmp_path, 1, limits=limits).open_batch(served(1))
        assert (batch.find(made.prompt) is not None) == is_there
    assert f"'stop' after token {min(ends)}, but responses end with one of" in caplog.text


def test_one_rank_says_what_is_dropped(tmp_path, caplog):
    bad, _ = next(poison(2))
    write(tmp_path, [bad])
    for rank in (1, 0):
        assert "drawn again" not in caplog.text
        assert checked(tmp_path, 1, rank).open_batch(served(1)).find(bad.prompt) is None
    assert caplog.text.count("drawn again") == 1


# ---- withdrawal ----------------------------------------------------------------------------------

ONE, TWO = "http://one:8000", "http://two:8000"
MADE_BY = [((ONE, 1), (TWO, 1)), ((ONE, 2),), ((TWO, 2),), ((TWO, 3), (ONE, 1))]


def with_withdrawal(directory, endpoint, proof, rank=0):
    """A batch of four groups, in the first attempt; and what was withdrawn of it."""
    batch = journal(directory, rank=rank).open_batch(served(0))
    for index, made_by in enumerate(MADE_BY):
        batch.add(group(index + 10 * rank, made_by=made_by))
    return batch, batch.withdraw(endpoint, proof)


@pytest.mark.parametrize(
    "endpoint, proof, kept",
    [
        (ONE, 2, [0, 2, 3]),
        (ONE, 1, [2]),
        (TWO, 2, [0, 1]),
        (TWO, 3, [0, 1, 2]),
        (TWO, 0, [1]),
        (ONE, 3, [0, 1, 2, 3]),
        ("http://three:8000", 0, [0, 1, 2, 3]),
    ],
)
def test_groups_since_an_endpoints_proof_are_withdrawn_others_kept(tmp_path, endpoint, proof, kept):
    """One response is enough. In this attempt, and after a resume."""
    batch, num_withdrawn = with_withdrawal(tmp_path, endpoint, proof)
    assert num_withdrawn == 4 - len(kept)
    resumed = journal(tmp_path, attempt=1).open_batch(served(1))
    for there in (batch, resumed):
        assert [i for i in range(4) if there.find(prompt(i)) is not None] == kept
    assert [stored.position for stored in batch.added] == kept
    assert resumed.discarded == {prompt(i).key for i in range(4) if i not in kept}
    assert len(read(tmp_path)) == 4  # what was withdrawn can still be looked at


def test_a_withdrawn_group_is_generated_again(tmp_path):
    batch, _ = with_withdrawal(tmp_path, ONE, 2)
    batch.begin_again()
    again, _ = batch.add(group(1, lengths=(7,), made_by=((ONE, 3),)))
    resumed = journal(tmp_path, attempt=1).open_batch(served(1))
    for there in (batch, resumed):
        assert contents(there.find(prompt(1)).load()) == contents(again)
    assert resumed.discarded == frozenset()
    # and withdrawn again; the group of the first time does not come back
    batch.withdraw(ONE, 3)
    assert batch.find(prompt(1)) is None
    third = journal(tmp_path, attempt=2).open_batch(served(2))
    assert third.find(prompt(1)) is None and third.discarded == {prompt(1).key}


def test_a_group_that_comes_after_its_withdrawal_is_refused(tmp_path):
    """Its last response was on the way, or it was just being written."""
    batch = journal(tmp_path).open_batch(served(0))
    production = Production(batch)
    batch.withdraw(ONE, 2)
    with pytest.raises(BatchWithdrawn, match="http://one:8000 failed its proof"):
        production.add(group(1, made_by=((TWO, 5), (ONE, 2))))
    production.add(group(0, made_by=((ONE, 1),)))
    batch.begin_again()
    with pytest.raises(BatchWithdrawn, match="has begun again"):
        production.add(group(2))
    Production(batch).add(group(1, made_by=((ONE, 2),)))  # it has proved itself again
    assert [stored.prompt.index for stored in batch.added] == [0, 1]
    resumed = journal(tmp_path, attempt=1).open_batch(served(1))
    assert [i for i in range(3) if resumed.find(prompt(i)) is not None] == [0, 1]


def test_a_rank_that_died_before_it_was_told_has_withdrawn_groups_too(tmp_path):
    """Another rank counts proofs of its own: all that the endpoint has made there is in doubt."""
    other = journal(tmp_path, rank=1).open_batch(served(0))
    for index, made_by in enumerate(MADE_BY):
        other.add(group(10 + index, made_by=made_by))
    with_withdrawal(tmp_path, ONE, 2)
    resumed = journal(tmp_path, attempt=1).open_batch(served(1))
    kept = [i for i in (*range(4), *range(10, 14)) if resumed.find(prompt(i)) is not None]
    assert kept == [0, 2, 3, 12]
    # one that was told has withdrawn what it had to; what came later is sound
    other.withdraw(ONE, 0)
    other.begin_again()
    other.add(group(11, made_by=((ONE, 1),)))
    resumed = journal(tmp_path, attempt=1).open_batch(served(1))
    kept = [i for i in (*range(4), *range(10, 14)) if resumed.find(prompt(i)) is not None]
    assert kept == [0, 2, 3, 11, 12]


def test_arrays_of_a_recovered_group_can_be_written_to(tmp_path):
    write(tmp_path, [group(0)])
    recovered = journal(tmp_path, attempt=1).open_batch(served(1)).find(prompt(0)).load()
    for completion in recovered.completions:
        arrays = (completion.token_ids, completion.logprobs, completion.loss_mask)
        assert all(array.flags.writeable for array in arrays)  # torch.from_numpy wants that


def test_other_weights_discard_what_was_journalled(tmp_path):
    write(tmp_path, [group(0), group(1)])
    second = journal(tmp_path, attempt=1).open_batch(served(1, digest=OTHER_WEIGHTS))
    assert second.find(prompt(0)) is None
    assert second.discarded == {prompt(0).key, prompt(1).key}
    assert second.accepted_versions == {"run:1:3"}
    second.add(group(0, version="run:1:3"))  # generated again
    second.close()
    # the weights of the first attempt are back: its groups are on-policy again, the second's are
    # not
    third = journal(tmp_path, attempt=2).open_batch(served(2))
    assert third.find(prompt(0)).load().policy_version == "run:0:3"
    assert third.find(prompt(1)) is not None and third.discarded == frozenset()
    assert third.accepted_versions == {"run:0:3", "run:2:3"}


def test_a_prompt_journalled_again_is_discarded_only_if_no_attempt_had_these_weights(tmp_path):
    write(tmp_path, [group(0), group(1)], digest=OTHER_WEIGHTS)
    write(tmp_path, [group(0, version="run:1:3")], attempt=1)
    third = journal(tmp_path, attempt=2).open_batch(served(2))
    assert third.find(prompt(0)).load().policy_version == "run:1:3"
    assert third.discarded == {prompt(1).key}


def test_a_run_of_another_name_is_not_this_one(tmp_path):
    write(tmp_path, [group(0)])
    other = served(1)
    other = replace(other, version=other.version._replace(run="copy"))
    batch = journal(tmp_path, attempt=1).open_batch(other)
    assert batch.find(prompt(0)) is None and batch.accepted_versions == {"copy:1:3"}


def test_other_settings_discard_what_was_journalled(tmp_path):
    before = Journal(tmp_path, 0, 0, "never", settings="temperature 1").open_batch(served(0))
    before.add(group(0))
    before.close()
    same = Journal(tmp_path, 1, 0, "never", settings="temperature 1").open_batch(served(1))
    assert same.find(prompt(0)) is not None
    other = Journal(tmp_path, 1, 0, "never", settings="temperature 2").open_batch(served(1))
    assert other.find(prompt(0)) is None and other.discarded == {prompt(0).key}
    assert other.accepted_versions == {"run:1:3"}


@pytest.mark.parametrize(
    "section, change, same",
    [
        ("rollout", {"temperature": 0.9}, False),
        ("rollout", {"num_generations": 4}, False),
        ("rollout", {"queue_size": 3}, True),
        ("run", {"seed": 7}, False),
        ("inference", {"max_inflight": 3}, True),
        ("scoring", {"truncated_reward": 0.0}, False),
        ("scoring", {"num_workers": 3}, True),
        ("recipe", {"mask_truncated": True}, True),  # decides what is trained of them
    ],
)
def test_settings_tell_what_groups_are_made_with(section, change, same):
    def settings(values, *, rejects=False):
        plain = {
            "model": {"path": "model"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://h:1"]},
            "rewards": [{"name": "exact"}],
        }
        plain[section] = plain.get(section, {}) | values
        return group_settings(Config.model_validate(plain), rejects=rejects)

    assert (settings({}) == settings(change)) == same
    if section == "recipe":  # it decides of them too
        assert settings({}, rejects=True) != settings(change, rejects=True)


def test_settings_tell_an_edited_reward_file(tmp_path):
    file = tmp_path / "reward.py"

    def settings(text):
        file.write_text(text)
        plain = {
            "model": {"path": "model"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://h:1"]},
            "rewards": [{"file": str(file)}],
        }
        return group_settings(Config.model_validate(plain), rejects=False)

    assert settings("a = 1") == settings("a = 1") != settings("a = 2")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"max_turns": 3}, False),
        ({"on_failure": "zero"}, False),
        ({"weight": 2.0}, False),
        ({"rewards": [{"name": "math"}]}, False),
        ({"num_hosts": 2, "max_rollouts": 4, "idle_timeout_s": 9.0}, True),
    ],
)
def test_settings_tell_other_environments(tmp_path, change, same):
    def settings(values, *, tools="def add(a: int, b: int) -> int: ...", parser="auto"):
        (tmp_path / "tools.py").write_text(tools)
        given = {"name": "sums", "tools": [{"file": str(tmp_path / "tools.py")}]}
        plain = {
            "model": {"path": "model"},
            "data": {"files": ["prompts.jsonl"], "tool_parser": parser},
            "inference": {"endpoints": ["http://h:1"]},
            "environments": [given | {"rewards": [{"name": "exact"}]} | values],
        }
        return group_settings(Config.model_validate(plain), rejects=False)

    assert (settings({}) == settings(change)) == same
    assert settings({}) != settings({}, tools="def sub(a: int, b: int) -> int: ...")
    assert settings({}) != settings({}, parser="hermes")


def test_a_changed_dataset_is_an_error_that_names_the_prompt(tmp_path):
    write(tmp_path, [group(4)])
    batch = journal(tmp_path, attempt=1).open_batch(served(1))
    edited = replace(prompt(4), token_ids=prompt(4).token_ids + 1)
    with pytest.raises(JournalError, match="prompt 4 of epoch 2 had other tokens.*same data"):
        batch.find(edited)


def test_a_batch_has_its_own_groups_and_prune_removes_the_older_ones(tmp_path):
    for v in (2, 3, 4):
        batch = journal(tmp_path).open_batch(served(v=v))
        batch.add(group(v, version=f"run:0:{v}"))
        batch.close()
    second = journal(tmp_path, attempt=1)
    assert second.open_batch(served(1, v=3)).find(prompt(2)) is None
    second.prune(before_v=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-000004"]
    assert second.open_batch(served(1, v=4)).find(prompt(4)) is not None


def test_a_batch_that_cannot_be_removed_is_told_and_goes_later(tmp_path, monkeypatch, caplog):
    for v in (2, 3, 4):
        (tmp_path / f"batch-{v:06d}").mkdir()

    def busy(folder):
        if "000002" in folder.name:
            raise OSError(errno.EBUSY, "Device or resource busy", f"{folder}/.nfs0001")
        folder.rmdir()

    with monkeypatch.context() as patched:
        patched.setattr("easyrl.ledger.journal.batch.shutil.rmtree", busy)
        journal(tmp_path).prune(before_v=4)
        journal(tmp_path).prune(before_v=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-000002.gone", "batch-000004"]
    assert "batch-000002.gone" in caplog.text and ".nfs0001" in caplog.text
    journal(tmp_path).prune(before_v=4)
    assert [path.name for path in tmp_path.iterdir()] == ["batch-000004"]


def test_read_batch_gives_every_record_of_every_attempt_and_rank(tmp_path):
    write(tmp_path, [group(0), group(2)], rank=0)
    write(tmp_path, [group(1)], rank=1)
    write(tmp_path, [group(1, version="run:1:3")], attempt=1, digest=OTHER_WEIGHTS)
    records = read(tmp_path)
    assert [(r.attempt, r.rank, r.key, r.version, r.weights) for r in records] == [
        (0, 0, (0, 0), "run:0:3", WEIGHTS),
        (0, 0, (1, 2), "run:0:3", WEIGHTS),
        (0, 1, (0, 1), "run:0:3", WEIGHTS),
        (1, 0, (0, 1), "run:1:3", OTHER_WEIGHTS),
    ]
    assert contents(records[1].group) == contents(group(2))
    assert len({record.digest for record in records}) == 4
    assert records[0].digest == records[0].group.digest
    assert read(tmp_path / "nothing") == []


def test_nothing_is_written_behind_what_an_attempt_left(tmp_path):
    path = write(tmp_path, [group(0)])
    with pytest.raises(JournalError, match="attempt0-rank0.journal is there already"):
        journal(tmp_path).open_batch(served(0)).add(group(1))
    os.rename(path, path.with_name("attempt7-rank0.journal"))
    with pytest.raises(JournalError, match="of a later attempt than this one"):
        journal(tmp_path, attempt=1).open_batch(served(1))
    os.rename(path.with_name("attempt7-rank0.journal"), path.with_name("attempt1-rank0.journal"))
    with pytest.raises(JournalError, match="moved or renamed"):
        journal(tmp_path, attempt=2).open_batch(served(2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": "run:0:4"}, "is of version run:0:4"),
        ({"weights": OTHER_WEIGHTS}, f"of weights {OTHER_WEIGHTS[:12]}"),
        ({"prompt_token_ids": b"abc"}, "not int32"),
        ({"completions": None}, "not a group"),
    ],
)
def test_a_forged_record_whose_checksum_is_right_is_refused(tmp_path, change, message):
    source = write(tmp_path / "source", [group(0)])
    header, record = (payload for _, payload in read_records(source))
    forged = msgspec.structs.replace(decode_record(record), **change)
    writer = RecordWriter(tmp_path / "batch-000003" / "attempt0-rank0.journal", durable=False)
    writer.append(header)
    place = writer.append(msgspec.msgpack.encode(forged))
    writer.close()
    with pytest.raises(JournalError, match=f"byte {place.offset}.*{message}"):
        read(tmp_path)


def test_a_record_that_changes_after_it_was_found_is_refused_when_it_is_loaded(tmp_path):
    path = write(tmp_path, [group(0), group(1)])
    found = journal(tmp_path, attempt=1).open_batch(served(1)).find(prompt(0))
    data = bytearray(path.read_bytes())
    data[found.place.offset + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=f"byte {found.place.offset}: this record was changed"):
        found.load()
    path.unlink()
    with pytest.raises(JournalError, match="cannot be read"):
        found.load()
    write(tmp_path, [replace(group(0), scores=group(3).scores)])  # sound, but not what was found
    with pytest.raises(JournalError, match="this record was changed"):
        found.load()


@pytest.mark.parametrize("at", [3, 40, -30])  # magic line, header, last record
def test_a_damaged_file_is_set_aside_and_its_groups_are_drawn_again(tmp_path, at, caplog):
    path = write(tmp_path, [group(0), group(1)])
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match="attempt0-rank0.journal: byte"):
        read(tmp_path)
    events = []
    record = lambda event, **fields: events.append((event, fields))  # noqa: E731
    batch = replace(journal(tmp_path, attempt=1), record=record).open_batch(served(1))
    assert batch.find(prompt(0)) is None and batch.find(prompt(1)) is None
    ((event, fields),) = events
    assert event == "journal_set_aside" and fields["file"] == "attempt0-rank0.journal.damaged"
    assert re.search(f"{path}: byte .*; set aside as {fields['file']}", caplog.text)
    assert path.with_name(fields["file"]).read_bytes() == data and not path.exists()
    batch.add(group(0, "run:1:3"))
    batch.close()
    assert [record.key for record in read(tmp_path)] == [(0, 0)]  # nothing is in the way
    other = journal(tmp_path, attempt=2, rank=1).open_batch(served(2))
    assert other.find(prompt(0)) is not None


def test_a_file_that_another_rank_has_set_aside_is_gone_for_this_one(tmp_path):
    path = write(tmp_path, [group(0)])
    path.unlink()
    journal(tmp_path, attempt=1, rank=1).set_aside(path, "a problem")


def test_zeros_that_a_power_loss_leaves_are_a_torn_tail(tmp_path, caplog):
    path = write(tmp_path, [group(0), group(1)])
    whole = path.read_bytes()
    second = list(read_records(path))[2][0].offset
    for cut in (second, second + 2, second + 24, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:cut] + bytes(70_000))
        caplog.clear()
        assert [record.key for record in read(tmp_path)] == (
            [(0, 0), (0, 1)] if cut == len(whole) else [(0, 0)]
        )
        assert (f"byte {second}" in caplog.text) == (second < cut < len(whole))


def test_a_journal_of_an_earlier_version_names_the_commit_that_read_it(tmp_path):
    path = write(tmp_path, [group(0)])
    path.write_bytes(path.read_bytes().replace(b"EasyRL journal 2\n", b"EasyRL journal 1\n", 1))
    told = "attempt0-rank0.journal: was written in format 1.*commit e7cfbd6 is the last that reads"
    with pytest.raises(JournalError, match=told):
        read(tmp_path)
    with pytest.raises(JournalError, match=told):
        journal(tmp_path, attempt=1).open_batch(served(1))


def test_a_full_disk_is_named_and_the_records_before_it_stay_usable(tmp_path):
    batch = journal(tmp_path).open_batch(served())
    batch.add(group(0))
    path = tmp_path / "batch-000003" / "attempt0-rank0.journal"
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))  # half of the next record
    try:
        with pytest.raises(
            JournalError, match="attempt0-rank0.journal: cannot be written.*--resume"
        ):
            batch.add(group(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    with pytest.raises(JournalError, match="cannot be written"):  # nothing comes behind the gap
        batch.add(group(2))
    assert [record.key for record in read(tmp_path)] == [(0, 0)]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "batch-000003").write_text("a file where the folder should be")
    with pytest.raises(JournalError, match="batch-000003.*cannot be written"):
        journal(tmp_path).open_batch(served()).add(group(0))


@pytest.mark.parametrize(
    "policy, after_adds, after_sync", [("group", 2, 0), ("batch", 0, 1), ("never", 0, 0)]
)
def test_fsync_policies(tmp_path, monkeypatch, policy, after_adds, after_sync):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".journal"):
            synced.append(name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    batch = journal(tmp_path, fsync=policy).open_batch(served())
    batch.add(group(0))
    batch.add(group(1))
    assert len(synced) == after_adds
    synced.clear()
    batch.sync()
    batch.sync()  # nothing is left to do
    assert len(synced) == after_sync


def test_a_failed_fsync_is_not_forgotten(tmp_path, monkeypatch):
    batch = journal(tmp_path, fsync="batch").open_batch(served())
    batch.add(group(0))

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(JournalError):
            batch.sync()
    with pytest.raises(JournalError, match="Input/output error"):
        batch.sync()  # the kernel would report success now


def test_a_killed_process_loses_no_group_that_was_added(tmp_path):
    program = """
        import os, signal, sys
        from pathlib import Path
        from tests.easyrl.ledger.journal_groups import group, journal, served
        batch = journal(Path(sys.argv[1]), fsync="never").open_batch(served())
        for index in range(5):
            batch.add(group(index))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert [contents(r.group) for r in read(tmp_path)] == [contents(group(i)) for i in range(5)]


def test_places_of_records_lead_back_to_them(tmp_path):
    path = write(tmp_path, [group(i) for i in range(3)])
    records = list(read_records(path))
    assert len(records) == 4  # with the header
    for place, payload in reversed(records):
        assert read_record(place) == payload
