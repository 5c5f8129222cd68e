"""What was trained together in one attempt is handed out together in the next."""

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.ledger.journal import JournalError, JournalledRollouts
from easyrl.ledger.journal.codec import (
    CodecError,
    DrainRecord,
    decode_drain,
    encode_drain,
    is_drain,
)
from easyrl.ledger.journal.drains import longest, usable_drains
from easyrl.ledger.journal.reading import read_drains
from easyrl.ledger.journal.rollouts import JournalledStream
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import FinishedSamples
from tests.dataloaders.rollout_parts import completion, generator, prompt
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    WEIGHTS,
    group,
    journal,
    read,
    served,
    write,
)
from tests.waiting import wait_until

Takes = list[list[int]]
quick = settings(max_examples=60, deadline=None)


class Attempts:
    """A batch that is begun again and again, each time with other delays."""

    def __init__(self, directory: Path, num_prompts: int, in_prompt_order: bool = False) -> None:
        self.prompts = [prompt(index, 3 + index % 4) for index in range(num_prompts)]
        self._directory = directory
        self._in_prompt_order = in_prompt_order
        self._number = 0

    def begin(self, budget: int, seed: int, kill_after=(99,), digest=WEIGHTS) -> list[Takes]:
        """Takes of each of ``len(kill_after)`` streams, which ends behind that many drains."""
        rng = random.Random(seed)

        async def generate(prompt, sample, version):
            await asyncio.sleep(rng.random() / 500)
            return completion(version)

        with LoopThread() as thread:
            rollouts = JournalledRollouts(
                generator(thread, generate, in_prompt_order=self._in_prompt_order),
                journal(self._directory, attempt=self._number),
            )
            self._number += 1
            size = -(-len(self.prompts) // len(kill_after))
            weights = served(self._number - 1, digest=digest)
            streams = [
                rollouts.produce(self.prompts[i * size : (i + 1) * size], weights, priority=i)
                for i in range(len(kill_after))
            ]
            return [
                [
                    [group.prompt.index for group in stream.drain_ready(budget)]
                    for _ in range(min(last, size))
                ]
                for stream, last in zip(streams, kill_after, strict=True)
            ]  # killed here: nothing is closed


def whole(drains: Takes) -> Takes:
    """Without the empty ones, behind the end."""
    return [take for take in drains if take]


@quick
@given(data=st.data())
def test_every_attempt_begins_with_what_was_drained_before(data):
    """Any arrivals, budgets and kills, streams that share a file, either order of groups."""
    num_streams = data.draw(st.integers(1, 2))
    num_prompts = data.draw(st.integers(num_streams, 8))
    before: list[Takes] = [[] for _ in range(num_streams)]
    budgets = st.integers(1, 80)
    with TemporaryDirectory() as folder:
        attempts = Attempts(Path(folder), num_prompts, data.draw(st.booleans()))
        for seed in range(data.draw(st.integers(1, 3))):
            kills = data.draw(st.tuples(*[st.integers(0, 6)] * num_streams))
            for number, drains in enumerate(attempts.begin(data.draw(budgets), seed, kills)):
                common = min(len(drains), len(before[number]))
                assert drains[:common] == before[number][:common]
                before[number] = max(before[number], whole(drains), key=len)
        everything = (99,) * num_streams
        closed = [whole(drains) for drains in attempts.begin(data.draw(budgets), 98, everything)]
        for drains, first in zip(closed, before, strict=True):
            assert drains[: len(first)] == first
        assert sorted(sum(sum(closed, []), [])) == list(range(num_prompts))
        again = attempts.begin(data.draw(budgets), 99, everything)
        assert [whole(drains) for drains in again] == closed


def test_the_attempt_that_took_most_is_repeated_not_one_that_had_only_begun_to_repeat_it(tmp_path):
    attempts = Attempts(tmp_path, 6)
    (closed,) = attempts.begin(1, seed=1)
    assert closed != sorted(closed)  # as they arrived
    assert attempts.begin(1, 2, kill_after=(1,)) == [closed[:1]]
    assert attempts.begin(10_000, 3) == [closed]


def test_what_other_weights_took_is_not_repeated(tmp_path):
    attempts = Attempts(tmp_path, 6)
    attempts.begin(1, seed=1)
    attempts.begin(10_000, seed=2, digest=OTHER_WEIGHTS)
    taken = journal(tmp_path, attempt=3).open_batch(served(3)).drained_before(attempts.prompts)
    assert {take.max_tokens for take in taken} == {1} and len(taken) == 6


def test_another_rank_took_other_groups(tmp_path):
    attempts = Attempts(tmp_path, 4)
    attempts.begin(1, seed=1)
    batch = journal(tmp_path, attempt=1, rank=1).open_batch(served(1))
    assert not batch.drained_before(attempts.prompts)
    assert batch.find(attempts.prompts[0]) is not None


def test_readers_of_groups_do_not_see_what_was_taken(tmp_path):
    batch = journal(tmp_path).open_batch(served(0))
    for index in (0, 1):
        batch.add(group(index))
        batch.add_drain([group(index).prompt.key], 64)
    batch.close()
    assert [record.key for record in read(tmp_path)] == [(0, 0), (0, 1)]
    (drains,) = read_drains(tmp_path, 3, attempt=0)
    assert drains == [DrainRecord([(0, 0)], 64), DrainRecord([(0, 1)], 64)]
    assert list(read_drains(tmp_path, 3, attempt=1)) == []
    other = journal(tmp_path, attempt=1).open_batch(served(1, digest=OTHER_WEIGHTS))
    assert other.discarded == {(0, 0), (0, 1)}


def test_a_journal_without_takes_has_none(tmp_path):
    write(tmp_path, [group(0)])
    batch = journal(tmp_path, attempt=1).open_batch(served(1))
    assert not batch.drained_before([group(0).prompt])
    assert batch.find(group(0).prompt) is not None


def take(*indices: int) -> DrainRecord:
    return DrainRecord([(0, index) for index in indices], 64)


@pytest.mark.parametrize(
    "drains, expected",
    [
        ([take(3), take(1, 2)], 2),
        ([take(8, 9), take(3)], 1),  # another stream's goes by
        ([take(1), take(2, 8), take(3)], 1),  # in part another rank's now
        ([take(1), take(4), take(3)], 1),  # not finished for these weights
        ([take(1), take(1, 2)], 1),  # no group twice
    ],
)
def test_takes_are_used_up_to_the_first_that_cannot_be_repeated(drains, expected):
    keys = {(0, index) for index in (1, 2, 3, 4)}
    usable = usable_drains(drains, keys, keys - {(0, 4)})
    assert usable == [take for take in drains if take.keys[0] in keys][:expected]


def test_of_equally_long_attempts_the_latest_counts():
    assert longest([[take(1), take(2)], [take(3, 4)], [take(5)]]) == [take(3, 4)]


def test_no_record_of_a_take_ends_in_a_zero_byte_or_passes_for_a_group():
    for keys, budget in (([(0, 0)], 0), ([(2, 256), (0, 2**40)], 2**32)):
        payload = encode_drain(keys, budget)
        assert payload[-1] != 0 and is_drain(payload)
        assert decode_drain(payload) == DrainRecord(keys, budget)
    with pytest.raises(CodecError, match="not what was taken together"):
        decode_drain(b"\x92\xa5taken")


def test_what_was_computed_ahead_is_kept_with_the_take_and_older_records_have_none():
    pieces = [[((0, 3), [2, 0]), ((1, 4), [1])], [((0, 3), [1])]]
    payload = encode_drain([(0, 3)], 64, pieces)
    assert payload[-1] != 0 and is_drain(payload)
    assert decode_drain(payload) == DrainRecord([(0, 3)], 64, pieces)
    plain = msgspec.msgpack.encode([[[0, 3]], 64, "taken"])
    assert plain == encode_drain([(0, 3)], 64)
    assert decode_drain(plain) == DrainRecord([(0, 3)], 64, [])


def piece(*responses: tuple[int, list[int]]) -> list[FinishedSamples]:
    found = [(group(index), numbers) for index, numbers in responses]
    return [FinishedSamples(g.prompt, {n: g.completions[n] for n in ns}) for g, ns in found]


def seen(pieces) -> list[list[tuple[int, list[int]]]]:
    """And each response is its group's own."""
    for each in (each for piece in pieces for each in piece):
        own = group(each.prompt.index).completions
        for number, found in each.completions.items():
            assert (found.token_ids == own[number].token_ids).all()
    return [[(each.prompt.index, list(each.completions)) for each in piece] for piece in pieces]


def test_pieces_that_an_earlier_attempt_computed_ahead_are_given_back_before_its_take(tmp_path):
    """Twice: an attempt that repeats them notes them again. One whose group was lost is dropped."""
    prompts = [group(index).prompt for index in range(3)]
    pieces = [piece((1, [1, 0]), (0, [0])), piece((2, [1]), (0, [1])), piece((1, [2]))]

    def begin(attempt: int, indices: list[int]) -> JournalledStream:
        async def generate(prompt, sample, version):
            assert prompt.index in indices
            if prompt.index == 2:
                await asyncio.Event().wait()  # never finished
            return group(prompt.index).completions[sample]

        rollouts = JournalledRollouts(
            generator(thread, generate), journal(tmp_path, attempt=attempt)
        )
        return rollouts.produce(prompts, served(attempt))

    with LoopThread() as thread:
        stream = begin(0, [0, 1, 2])
        wait_until(lambda: stream.waiting == 2)
        assert list(stream.ahead_of_drain(1)) == []
        for each in pieces[:2]:
            stream.note_ahead(each)
        (taken,) = stream.drain_ready(1)
        stream.note_ahead(pieces[2])
        (later,) = stream.drain_ready(1)
    (drains,) = read_drains(tmp_path, 3, attempt=0)
    assert [len(take.ahead) for take in drains] == [2, 1]
    for attempt in (1, 2):
        with LoopThread() as thread:
            stream = begin(attempt, [2])
            before = list(stream.ahead_of_drain(1))
            assert seen(before) == [[(1, [1, 0]), (0, [0])]]
            for each in before:
                stream.note_ahead(each)
            assert [g.prompt for g in stream.drain_ready(1)] == [taken.prompt]
            before = list(stream.ahead_of_drain(1))
            assert seen(before) == [[(1, [2])]]
            for each in before:
                stream.note_ahead(each)
            assert [g.prompt for g in stream.drain_ready(1)] == [later.prompt]
            assert list(stream.ahead_of_drain(1)) == []


def test_where_prompt_order_gives_the_takes_none_is_repeated(tmp_path):
    attempts = Attempts(tmp_path, 4)
    (closed,) = attempts.begin(1, seed=1)
    assert closed != sorted(closed)
    with LoopThread() as thread:
        rollouts = JournalledRollouts(
            generator(thread, None, in_prompt_order=True),
            journal(tmp_path, attempt=1),
            repeats_drains=False,
        )
        stream = rollouts.produce(attempts.prompts, served(1))
        assert [[g.prompt.index for g in stream.drain_ready(1)] for _ in closed] == sorted(closed)


def test_a_journal_that_cannot_be_written_is_told_to_the_trainer(tmp_path):
    (tmp_path / "batch-000003").write_text("no folder")
    batch = journal(tmp_path).open_batch(served(0))
    with pytest.raises(JournalError, match="cannot be written"):
        batch.add_drain([(0, 0)], 64)
