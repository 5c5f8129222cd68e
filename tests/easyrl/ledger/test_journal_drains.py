"""What was trained together in one attempt is handed out together in the next."""

import asyncio
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.producer.group_stream import GroupStream
from easyrl.ledger.journal.codec import (
    CodecError,
    DrainRecord,
    WithdrawalRecord,
    decode_any,
    decode_record,
    encode,
)
from easyrl.ledger.journal.earlier_attempts import longest, usable_drains
from easyrl.ledger.journal.reading import read_drains
from easyrl.ledger.journal.record_file import JournalError
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import FinishedSamples, Key
from tests.dataloaders.rollout_parts import completion, generator, prompt
from tests.easyrl.ledger.journal_groups import (
    OTHER_WEIGHTS,
    URL,
    WEIGHTS,
    group,
    journal,
    read,
    rollouts_of,
    served,
    write,
)
from tests.waiting import wait_until

Drains = list[list[int]]
quick = settings(max_examples=60, deadline=None)


class Attempts:
    """A batch that is begun again and again, each time with other delays.

    ``rejected``: prompts that the recipe does not want.
    """

    def __init__(
        self,
        directory: Path,
        num_prompts: int,
        in_prompt_order: bool = False,
        rejected: frozenset[int] = frozenset(),
    ) -> None:
        self.prompts = [prompt(index, 3 + index % 4) for index in range(num_prompts)]
        self._directory = directory
        self._in_prompt_order = in_prompt_order
        self._rejected = rejected
        self._number = 0

    @property
    def keys(self) -> dict[Key, int]:
        return {each.key: 0 for each in self.prompts}

    def begin(self, budget: int, seed: int, kill_after=(99,), digest=WEIGHTS) -> list[Drains]:
        """Drains of ``len(kill_after)`` updates; it is killed behind so many of one of them."""
        rng = random.Random(seed)

        async def generate(prompt, sample, version):
            await asyncio.sleep(rng.random() / 500)
            return completion(version)

        with LoopThread() as thread:
            num_updates = len(kill_after)
            num_accepted = len(self.prompts) - len(self._rejected)
            rollouts = rollouts_of(
                self._directory,
                self._number,
                generator(thread, generate, in_prompt_order=self._in_prompt_order),
                self.prompts,
                batch_size=num_accepted,
                num_updates=num_updates,
                accept=lambda group: "odd" if group.prompt.index in self._rejected else None,
            )
            self._number += 1
            batch = rollouts.begin(served(self._number - 1, digest=digest), 0)
            size = num_accepted // num_updates
            drained: list[Drains] = []
            for stream, last in zip(batch.updates, kill_after, strict=True):
                if drained and sum(map(len, drained[-1])) < size:
                    last = 0  # the update before was not drained to its end
                ready = (stream.drain_ready(budget) for _ in range(min(last, size)))
                drained.append([[group.prompt.index for group in groups] for groups in ready])
            return drained  # killed here: nothing is closed


def whole(drains: Drains) -> Drains:
    """Without the empty ones, behind the end."""
    return [drain for drain in drains if drain]


@quick
@given(data=st.data())
def test_every_attempt_begins_with_what_was_drained_before(data):
    """Any arrivals, rejections, budgets and kills, updates of one file, either order of groups."""
    num_streams = data.draw(st.integers(1, 2))
    num_accepted = num_streams * data.draw(st.integers(1, 8 // num_streams))
    num_prompts = num_accepted + data.draw(st.integers(0, 3))
    rejected = frozenset(data.draw(st.permutations(range(num_prompts)))[num_accepted:])
    before: list[Drains] = [[] for _ in range(num_streams)]
    budgets = st.integers(1, 80)
    with TemporaryDirectory() as folder:
        attempts = Attempts(Path(folder), num_prompts, data.draw(st.booleans()), rejected)
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
        assert set(sum(sum(closed, []), [])) == set(range(num_prompts)) - rejected
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
    taken = journal(tmp_path, attempt=3).open_batch(served(3)).drained_before(attempts.keys)
    assert {drain.max_tokens for drain in taken} == {1} and len(taken) == 6


def test_another_rank_took_other_groups(tmp_path):
    attempts = Attempts(tmp_path, 4)
    attempts.begin(1, seed=1)
    batch = journal(tmp_path, attempt=1, rank=1).open_batch(served(1))
    assert not batch.drained_before(attempts.keys)
    assert batch.find(attempts.prompts[0]) is not None


def test_readers_of_groups_do_not_see_what_was_taken(tmp_path):
    batch = journal(tmp_path).open_batch(served(0))
    for index in (0, 1):
        batch.add(group(index))
        batch.add_drain(index, [group(index).prompt.key], 64)
    batch.close()
    assert [record.key for record in read(tmp_path)] == [(0, 0), (0, 1)]
    (drains,) = read_drains(tmp_path, 3, attempt=0)
    assert drains == [DrainRecord([(0, 0)], 64, 0), DrainRecord([(0, 1)], 64, 1)]
    assert list(read_drains(tmp_path, 3, attempt=1)) == []
    other = journal(tmp_path, attempt=1).open_batch(served(1, digest=OTHER_WEIGHTS))
    assert other.discarded == {(0, 0), (0, 1)}


def test_a_journal_without_drains_has_none(tmp_path):
    write(tmp_path, [group(0)])
    batch = journal(tmp_path, attempt=1).open_batch(served(1))
    assert not batch.drained_before({group(0).prompt.key: 0})
    assert batch.find(group(0).prompt) is not None


def test_what_was_drained_before_the_batch_began_again_is_not_repeated(tmp_path):
    """On the rank whose groups were withdrawn, and on one that only began again with it."""
    withdrawn, other = (journal(tmp_path, rank=rank).open_batch(served(0)) for rank in (0, 1))
    for batch, indices in ((withdrawn, (0, 1)), (other, (2, 3))):
        keys = [group(index).prompt.key for index in indices]
        for index in indices:
            batch.add(group(index, made_by=((URL, index),)))
        batch.add_drain(0, keys, 64)
    withdrawn.withdraw(URL, 1)
    other.withdraw(URL, 4)
    for batch, indices in ((withdrawn, (0,)), (other, (3, 2))):
        batch.begin_again()
        for index in indices:
            batch.add_drain(0, [group(index).prompt.key], 64)
    for rank, order in ((0, [0]), (1, [3, 2])):
        resumed = journal(tmp_path, attempt=1, rank=rank).open_batch(served(1))
        usable = resumed.drained_before({group(i).prompt.key: 0 for i in range(4)})
        assert [drain.keys for drain in usable] == [[group(i).prompt.key] for i in order]
    drains = list(read_drains(tmp_path, 3, attempt=0))
    assert [[drain.keys for drain in each] for each in drains] == [
        [[group(0).prompt.key]],
        [[group(3).prompt.key], [group(2).prompt.key]],
    ]


def drain(*indices: int, update: int = 0) -> DrainRecord:
    return DrainRecord([(0, index) for index in indices], 64, update)


@pytest.mark.parametrize(
    "drains, expected",
    [
        ([drain(3), drain(1, 2)], 2),
        ([drain(1, 2), drain(3), drain(5, update=1)], 3),
        ([drain(5, update=1), drain(3)], 2),
        ([drain(8, 9), drain(3)], 0),  # another rank's now
        ([drain(1), drain(2, 8), drain(3)], 1),  # in part another rank's
        ([drain(1), drain(4), drain(3)], 1),  # not finished for these weights
        ([drain(1), drain(1, 2)], 1),  # no group twice
        ([drain(1), drain(5), drain(3)], 1),  # belongs to another update now
        ([drain(1), drain(2, 5), drain(3)], 1),  # in part
        ([drain(1), drain(6, update=1), drain(3)], 1),  # its update is not certain any more
    ],
)
def test_drains_are_used_up_to_the_first_that_cannot_be_repeated(drains, expected):
    updates = {(0, 1): 0, (0, 2): 0, (0, 3): 0, (0, 5): 1, (0, 6): None}
    assert usable_drains(drains, updates) == drains[:expected]


def test_of_equally_long_attempts_the_latest_counts():
    assert longest([[drain(1), drain(2)], [drain(3, 4)], [drain(5)]]) == [drain(3, 4)]


def test_no_record_of_a_drain_or_withdrawal_ends_in_a_zero_byte_or_passes_for_a_group():
    for keys, budget, update in (([(0, 0)], 0, 0), ([(2, 256), (0, 2**40)], 2**32, 1)):
        payload = encode(DrainRecord(keys, budget, update))
        assert payload[-1] != 0 and decode_any(payload) == DrainRecord(keys, budget, update)
        with pytest.raises(CodecError, match="not a group"):
            decode_record(payload)
    for proof in (0, 256):
        payload = encode(WithdrawalRecord(URL, proof, 0))
        assert payload[-1] != 0 and decode_any(payload) == WithdrawalRecord(URL, proof, 0)
        with pytest.raises(CodecError, match="not a group"):
            decode_record(payload)
    for broken in (b"\x92\xa5drain", b"\x92\xaawithdrawal"):
        with pytest.raises(CodecError, match="not a record of the trainer's"):
            decode_any(broken)


def test_what_was_computed_ahead_is_kept_with_the_drain():
    pieces = [[((0, 3), [2, 0]), ((1, 4), [1])], [((0, 3), [1])]]
    payload = encode(DrainRecord([(0, 3)], 64, 1, pieces, restart=2))
    assert payload[-1] != 0 and decode_any(payload) == DrainRecord([(0, 3)], 64, 1, pieces, 2)
    assert decode_any(encode(DrainRecord([(0, 3)], 64, 1))).ahead == []


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


def test_pieces_that_an_earlier_attempt_computed_ahead_are_given_back_before_its_drain(tmp_path):
    """Twice: an attempt that repeats them notes them again. One whose group was lost is dropped."""
    prompts = [group(index).prompt for index in range(3)]
    pieces = [piece((1, [1, 0]), (0, [0])), piece((2, [1]), (0, [1])), piece((1, [2]))]

    def begin(attempt: int, indices: list[int]) -> GroupStream:
        async def generate(prompt, sample, version):
            assert prompt.index in indices
            if prompt.index == 2:
                await asyncio.Event().wait()  # never finished
            return group(prompt.index).completions[sample]

        rollouts = rollouts_of(tmp_path, attempt, generator(thread, generate), prompts)
        return rollouts.begin(served(attempt), 0).updates[0]

    with LoopThread() as thread:
        stream = begin(0, [0, 1, 2])
        wait_until(lambda: len(read(tmp_path)) == 2)
        assert list(stream.ahead_of_drain(1)) == []
        for each in pieces[:2]:
            stream.note_ahead(each)
        (taken,) = stream.drain_ready(1)
        stream.note_ahead(pieces[2])
        (later,) = stream.drain_ready(1)
    (drains,) = read_drains(tmp_path, 3, attempt=0)
    assert [len(drain.ahead) for drain in drains] == [2, 1]
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


def test_where_prompt_order_gives_the_drains_none_is_repeated(tmp_path):
    attempts = Attempts(tmp_path, 4)
    (closed,) = attempts.begin(1, seed=1)
    assert closed != sorted(closed)
    with LoopThread() as thread:
        rollouts = rollouts_of(
            tmp_path,
            1,
            generator(thread, None, in_prompt_order=True),
            attempts.prompts,
            in_prompt_order=True,
        )
        (stream,) = rollouts.begin(served(1), 0).updates
        assert [[g.prompt.index for g in stream.drain_ready(1)] for _ in closed] == sorted(closed)


def test_a_journal_that_cannot_be_written_is_told_to_the_trainer(tmp_path):
    (tmp_path / "batch-000003").write_text("no folder")
    batch = journal(tmp_path).open_batch(served(0))
    with pytest.raises(JournalError, match="cannot be written"):
        batch.add_drain(0, [(0, 0)], 64)
