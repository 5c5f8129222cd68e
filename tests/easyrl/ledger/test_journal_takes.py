"""What was trained together in one life is handed out together in the next."""

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.producer.loop_thread import LoopThread
from easyrl.ledger.journal import JournalError, JournalledRollouts
from easyrl.ledger.journal.codec import (
    CodecError,
    TakenRecord,
    decode_taken,
    encode_taken,
    is_taken,
)
from easyrl.ledger.journal.reading import read_takes
from easyrl.ledger.journal.rollouts import JournalledStream
from easyrl.ledger.journal.takes import longest, usable_takes
from easyrl.schema import FinishedSamples
from tests.dataloaders.rollout_parts import completion, generator, prompt, wait_until
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    WEIGHTS,
    group,
    journal,
    read,
    served,
    write,
)

Takes = list[list[int]]
quick = settings(max_examples=60, deadline=None)


class Lives:
    """A batch that is begun again and again, each time with other delays."""

    def __init__(self, directory: Path, num_prompts: int, in_prompt_order: bool = False) -> None:
        self.prompts = [prompt(index, 3 + index % 4) for index in range(num_prompts)]
        self._directory = directory
        self._in_prompt_order = in_prompt_order
        self._number = 0

    def begin(self, budget: int, seed: int, kill_after=(99,), digest=WEIGHTS) -> list[Takes]:
        """Takes of each of ``len(kill_after)`` streams, which ends behind that many takes."""
        rng = random.Random(seed)

        async def generate(prompt, sample, version):
            await asyncio.sleep(rng.random() / 500)
            return completion(version)

        with LoopThread() as thread:
            rollouts = JournalledRollouts(
                generator(thread, generate, in_prompt_order=self._in_prompt_order),
                journal(self._directory, life=self._number),
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
                    [group.prompt.index for group in stream.take_ready(budget)]
                    for _ in range(min(last, size))
                ]
                for stream, last in zip(streams, kill_after, strict=True)
            ]  # killed here: nothing is closed


def whole(takes: Takes) -> Takes:
    """Without the empty ones, behind the end."""
    return [take for take in takes if take]


@quick
@given(data=st.data())
def test_every_life_begins_with_what_was_taken_before(data):
    """Any arrivals, budgets and kills, streams that share a file, either order of groups."""
    num_streams = data.draw(st.integers(1, 2))
    num_prompts = data.draw(st.integers(num_streams, 8))
    before: list[Takes] = [[] for _ in range(num_streams)]
    budgets = st.integers(1, 80)
    with TemporaryDirectory() as folder:
        lives = Lives(Path(folder), num_prompts, data.draw(st.booleans()))
        for seed in range(data.draw(st.integers(1, 3))):
            kills = data.draw(st.tuples(*[st.integers(0, 6)] * num_streams))
            for number, takes in enumerate(lives.begin(data.draw(budgets), seed, kills)):
                common = min(len(takes), len(before[number]))
                assert takes[:common] == before[number][:common]
                before[number] = max(before[number], whole(takes), key=len)
        everything = (99,) * num_streams
        closed = [whole(takes) for takes in lives.begin(data.draw(budgets), 98, everything)]
        for takes, first in zip(closed, before, strict=True):
            assert takes[: len(first)] == first
        assert sorted(sum(sum(closed, []), [])) == list(range(num_prompts))
        again = lives.begin(data.draw(budgets), 99, everything)
        assert [whole(takes) for takes in again] == closed


def test_the_life_that_took_most_is_repeated_not_one_that_had_only_begun_to_repeat_it(tmp_path):
    lives = Lives(tmp_path, 6)
    (closed,) = lives.begin(1, seed=1)
    assert closed != sorted(closed)  # as they arrived
    assert lives.begin(1, 2, kill_after=(1,)) == [closed[:1]]
    assert lives.begin(10_000, 3) == [closed]


def test_what_other_weights_took_is_not_repeated(tmp_path):
    lives = Lives(tmp_path, 6)
    lives.begin(1, seed=1)
    lives.begin(10_000, seed=2, digest=OTHER_WEIGHTS)
    taken = journal(tmp_path, life=3).open_batch(served(3)).taken_before(lives.prompts)
    assert {take.max_tokens for take in taken} == {1} and len(taken) == 6


def test_another_rank_took_other_groups(tmp_path):
    lives = Lives(tmp_path, 4)
    lives.begin(1, seed=1)
    batch = journal(tmp_path, life=1, rank=1).open_batch(served(1))
    assert not batch.taken_before(lives.prompts)
    assert batch.find(lives.prompts[0]) is not None


def test_readers_of_groups_do_not_see_what_was_taken(tmp_path):
    batch = journal(tmp_path).open_batch(served(0))
    for index in (0, 1):
        batch.add(group(index))
        batch.add_taken([group(index).prompt.key], 64)
    batch.close()
    assert [record.key for record in read(tmp_path)] == [(0, 0), (0, 1)]
    (takes,) = read_takes(tmp_path, 3, life=0)
    assert takes == [TakenRecord([(0, 0)], 64), TakenRecord([(0, 1)], 64)]
    assert list(read_takes(tmp_path, 3, life=1)) == []
    other = journal(tmp_path, life=1).open_batch(served(1, digest=OTHER_WEIGHTS))
    assert other.discarded == {(0, 0), (0, 1)}


def test_a_journal_without_takes_has_none(tmp_path):
    write(tmp_path, [group(0)])
    batch = journal(tmp_path, life=1).open_batch(served(1))
    assert not batch.taken_before([group(0).prompt])
    assert batch.find(group(0).prompt) is not None


def take(*indices: int) -> TakenRecord:
    return TakenRecord([(0, index) for index in indices], 64)


@pytest.mark.parametrize(
    "takes, expected",
    [
        ([take(3), take(1, 2)], 2),
        ([take(8, 9), take(3)], 1),  # another stream's goes by
        ([take(1), take(2, 8), take(3)], 1),  # in part another rank's now
        ([take(1), take(4), take(3)], 1),  # not finished for these weights
        ([take(1), take(1, 2)], 1),  # no group twice
    ],
)
def test_takes_are_used_up_to_the_first_that_cannot_be_repeated(takes, expected):
    keys = {(0, index) for index in (1, 2, 3, 4)}
    usable = usable_takes(takes, keys, keys - {(0, 4)})
    assert usable == [take for take in takes if take.keys[0] in keys][:expected]


def test_of_equally_long_lives_the_latest_counts():
    assert longest([[take(1), take(2)], [take(3, 4)], [take(5)]]) == [take(3, 4)]


def test_no_record_of_a_take_ends_in_a_zero_byte_or_passes_for_a_group():
    for keys, budget in (([(0, 0)], 0), ([(2, 256), (0, 2**40)], 2**32)):
        payload = encode_taken(keys, budget)
        assert payload[-1] != 0 and is_taken(payload)
        assert decode_taken(payload) == TakenRecord(keys, budget)
    with pytest.raises(CodecError, match="not what was taken together"):
        decode_taken(b"\x92\xa5taken")


def test_what_was_computed_ahead_is_kept_with_the_take_and_older_records_have_none():
    pieces = [[((0, 3), [2, 0]), ((1, 4), [1])], [((0, 3), [1])]]
    payload = encode_taken([(0, 3)], 64, pieces)
    assert payload[-1] != 0 and is_taken(payload)
    assert decode_taken(payload) == TakenRecord([(0, 3)], 64, pieces)
    plain = msgspec.msgpack.encode([[[0, 3]], 64, "taken"])
    assert plain == encode_taken([(0, 3)], 64)
    assert decode_taken(plain) == TakenRecord([(0, 3)], 64, [])


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


def test_pieces_that_an_earlier_life_computed_ahead_are_given_back_before_its_take(tmp_path):
    """Twice: a life that repeats them notes them again. One whose group was lost is dropped."""
    prompts = [group(index).prompt for index in range(3)]
    pieces = [piece((1, [1, 0]), (0, [0])), piece((2, [1]), (0, [1])), piece((1, [2]))]

    def begin(life: int, indices: list[int]) -> JournalledStream:
        async def generate(prompt, sample, version):
            assert prompt.index in indices
            if prompt.index == 2:
                await asyncio.Event().wait()  # never finished
            return group(prompt.index).completions[sample]

        rollouts = JournalledRollouts(generator(thread, generate), journal(tmp_path, life=life))
        return rollouts.produce(prompts, served(life))

    with LoopThread() as thread:
        stream = begin(0, [0, 1, 2])
        wait_until(lambda: stream.waiting == 2)
        assert list(stream.ahead_of_take(1)) == []
        for each in pieces[:2]:
            stream.note_ahead(each)
        (taken,) = stream.take_ready(1)
        stream.note_ahead(pieces[2])
        (later,) = stream.take_ready(1)
    (takes,) = read_takes(tmp_path, 3, life=0)
    assert [len(take.ahead) for take in takes] == [2, 1]
    for life in (1, 2):
        with LoopThread() as thread:
            stream = begin(life, [2])
            before = list(stream.ahead_of_take(1))
            assert seen(before) == [[(1, [1, 0]), (0, [0])]]
            for each in before:
                stream.note_ahead(each)
            assert [g.prompt for g in stream.take_ready(1)] == [taken.prompt]
            before = list(stream.ahead_of_take(1))
            assert seen(before) == [[(1, [2])]]
            for each in before:
                stream.note_ahead(each)
            assert [g.prompt for g in stream.take_ready(1)] == [later.prompt]
            assert list(stream.ahead_of_take(1)) == []


def test_where_prompt_order_gives_the_takes_none_is_repeated(tmp_path):
    lives = Lives(tmp_path, 4)
    (closed,) = lives.begin(1, seed=1)
    assert closed != sorted(closed)
    with LoopThread() as thread:
        rollouts = JournalledRollouts(
            generator(thread, None, in_prompt_order=True),
            journal(tmp_path, life=1),
            repeats_takes=False,
        )
        stream = rollouts.produce(lives.prompts, served(1))
        assert [[g.prompt.index for g in stream.take_ready(1)] for _ in closed] == sorted(closed)


def test_a_journal_that_cannot_be_written_is_told_to_the_trainer(tmp_path):
    (tmp_path / "batch-000003").write_text("no folder")
    batch = journal(tmp_path).open_batch(served(0))
    with pytest.raises(JournalError, match="cannot be written"):
        batch.add_taken([(0, 0)], 64)
