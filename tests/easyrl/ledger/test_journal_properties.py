"""Whatever happens to a journal's files: a group that comes back is the one that was written."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.ledger.journal.record_file import JournalError, read_records
from easyrl.schema import Completion, Exclusion, Prompt, RolloutGroup, Score, VersionSpan
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    WEIGHTS,
    contents,
    group,
    journal,
    prompt,
    read,
    served,
    write,
)

quick = settings(max_examples=60, deadline=None)

int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(max_size=8)  # also with zero bytes
exclusions = st.builds(Exclusion, st.sampled_from(["too_long", "refused"]), text)


@st.composite
def completions(draw) -> Completion:
    token_ids = draw(st.lists(int32, max_size=12))
    size = len(token_ids)
    floats = st.floats(width=32)  # also NaN, infinities, -0.0
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(draw(st.lists(floats, min_size=size, max_size=size)), np.float32),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        version_spans=tuple(
            VersionSpan(draw(text), draw(int32), draw(int32))
            for _ in range(draw(st.integers(0, 3)))
        ),
        endpoint=draw(text),
        proof=draw(st.integers(0, 2**40)),
        loss_mask=np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool),
    )


@st.composite
def groups(draw, index: int) -> RolloutGroup:
    made = draw(st.lists(completions(), max_size=4))
    scores = st.builds(
        Score, st.floats(), st.dictionaries(text, st.floats(allow_nan=False)), st.booleans()
    )
    return RolloutGroup(
        prompt=Prompt(
            index,
            np.array(draw(st.lists(int32, min_size=1, max_size=9)), dtype=np.int32),
            "question",
            None,
            epoch=draw(st.integers(0, 3)),
        ),
        completions=tuple(made),
        scores=tuple(draw(scores) for _ in made),
        policy_version="run:0:3",
        dispatched_s=0.0,
        completed_s=1.0,
        position=draw(st.integers(0, 2**40)),
        excluded=draw(st.none() | exclusions),
        rejected=draw(st.none() | text),
    )


@quick
@given(data=st.data())
def test_any_groups_in_any_order_come_back_to_the_bit(data):
    count = data.draw(st.integers(0, 5))
    made = [data.draw(groups(index)) for index in range(count)]
    arrived = data.draw(st.permutations(made))
    num_ranks = data.draw(st.integers(1, 3))
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        for rank in range(num_ranks):
            write(directory, arrived[rank::num_ranks], rank=rank)
        batch = journal(directory, attempt=1).open_batch(served(1))
        for one in made:
            assert contents(batch.find(one.prompt).load()) == contents(one)
        assert {r.key for r in read(directory)} == {one.prompt.key for one in made}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[bytes, list[int]]:
    """A file of three groups, and where each of its records ends."""
    path = write(tmp_path_factory.mktemp("written"), [group(i, lengths=(2, 3)) for i in range(3)])
    data = path.read_bytes()
    starts = [place.offset for place, _ in read_records(path)]
    return data, [*starts[1:], len(data)]


def read_bytes(folder: Path, data: bytes) -> list[tuple]:
    path = folder / "batch-000003" / "attempt0-rank0.journal"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return [contents(record.group) for record in read(folder)]


def test_cut_off_at_every_byte_the_whole_groups_before_it_are_left(tmp_path, written):
    data, ends = written
    expected = [contents(group(i, lengths=(2, 3))) for i in range(3)]
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends[1:])  # the first record is the header
        assert read_bytes(tmp_path, data[:cut]) == expected[:whole], cut


def test_every_flipped_byte_is_found(tmp_path, written):
    data, _ = written
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x40
        with pytest.raises(JournalError, match="byte [0-9]+: "):
            read_bytes(tmp_path, bytes(changed))


@quick
@given(data=st.data())
def test_no_damage_at_all_gives_a_group_that_was_not_written(tmp_path_factory, written, data):
    """Any bytes in the place of others: an error, or whole groups from the first one on."""
    whole, _ = written
    expected = [contents(group(i, lengths=(2, 3))) for i in range(3)]
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damage = data.draw(st.binary(max_size=80) | st.integers(0, 80).map(bytes))
    with TemporaryDirectory() as folder:
        try:
            found = read_bytes(Path(folder), whole[:start] + damage + whole[end:])
        except JournalError:
            return
    assert found == expected[: len(found)]


@quick
@given(data=st.data())
def test_attempts_of_any_ranks_and_weights_lose_nothing_and_mix_nothing(data):
    """Against a model: each attempt trains what has its weights, generates the rest, and is killed.

    The model: of a prompt, the last whole record that was made by the attempt's own weights.
    """
    prompts = [prompt(index) for index in range(5)]
    kept: dict[tuple[str, tuple[int, int]], tuple] = {}  # weights, key → contents
    versions: dict[str, set[str]] = {WEIGHTS: set(), OTHER_WEIGHTS: set()}
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        for attempt in range(data.draw(st.integers(1, 4))):
            digest = data.draw(st.sampled_from([WEIGHTS, OTHER_WEIGHTS]))
            num_ranks = data.draw(st.integers(1, 3))
            version = f"run:{attempt}:3"
            order = data.draw(st.permutations(range(5)))
            survived = []
            for rank in range(num_ranks):
                batch = journal(directory, attempt, rank).open_batch(served(attempt, digest=digest))
                assert batch.accepted_versions == versions[digest] | {version}
                other = OTHER_WEIGHTS if digest == WEIGHTS else WEIGHTS
                assert batch.discarded == {
                    one.key for one in prompts if (other, one.key) in kept
                } - {one.key for one in prompts if (digest, one.key) in kept}
                finished = []
                for index in order[rank::num_ranks]:
                    key = prompts[index].key
                    found = batch.find(prompts[index])
                    assert (found is None) == ((digest, key) not in kept)
                    if found is None:
                        batch.add(group(index, version))
                        finished.append((digest, key, contents(group(index, version))))
                    else:
                        assert contents(found.load()) == kept[digest, key]
                batch.close()
                path = directory / "batch-000003" / f"attempt{attempt}-rank{rank}.journal"
                survived += _cut(data, path, finished)
            kept |= {(made_by, key): made for made_by, key, made in survived}
            versions[digest] |= _versions(directory, attempt)


def _cut(data, path: Path, finished: list) -> list:
    """Kills the attempt that wrote ``path`` at some byte; what is left of ``finished``."""
    if not path.exists():
        return []
    ends = [place.offset for place, _ in read_records(path)][2:] + [path.stat().st_size]
    cut = data.draw(st.integers(0, path.stat().st_size) | st.just(path.stat().st_size))
    os.truncate(path, cut)
    return [one for one, end in zip(finished, ends, strict=True) if end <= cut]


def _versions(directory: Path, attempt: int) -> set[str]:
    """An attempt's version, if a header of it is left."""
    files = (directory / "batch-000003").glob(f"attempt{attempt}-rank*.journal")
    return {f"run:{attempt}:3" for file in files if list(read_records(file))}
