"""A batch whose groups are routed to its optimizer steps, and replaced where they are refused."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import ProducerError
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import RolloutGroup
from tests.dataloaders.packed_rows import BUSY
from tests.dataloaders.rollout_parts import (
    G,
    MemoryStore,
    ScriptedGenerate,
    completion,
    generator,
    prompt,
)
from tests.waiting import wait_until


class TooLong(Exception):
    """A prompt's own fault."""


def reject(*indices: int):
    """An ``Accept`` that does not want these prompts' groups."""
    return lambda group: "unwanted" if group.prompt.index in indices else None


def positions(groups) -> list[int]:
    return [group.position for group in groups]


def begin(thread, generate, batch_size, num_updates=1, *, limits=None, store=None, **options):
    """A batch whose prompt at position p has index p. ``options`` of producer and batch."""
    batch_options = {n: options.pop(n) for n in ("accept", "recovered") if n in options}
    membership = BatchMembership(batch_size, num_updates, **(limits or {}))
    for position, stored in batch_options.get("recovered", ()):
        membership.decide(position, not stored.refused)
    return generator(thread, generate, **options).produce_batch(
        Draws(membership), prompt, "v", store=store, **batch_options
    )


def test_a_rejected_group_is_replaced_and_reaches_no_stream():
    store = MemoryStore()
    with LoopThread() as thread:
        batch = begin(
            thread,
            ScriptedGenerate(open_indices=range(9)),
            3,
            accept=reject(0, 2),
            store=store,
        )
        assert sorted(positions(batch.updates[0])) == [1, 3, 4]
    assert sorted((g.position, g.outcome, g.reason) for g in batch.refused) == [
        (0, "rejected", "unwanted"),
        (2, "rejected", "unwanted"),
    ]
    # what is refused is kept too: it counts in R when the batch is begun again
    assert {key[1]: group.rejected for key, group in store.groups.items()} == {
        **{0: "unwanted", 1: None, 2: "unwanted", 3: None, 4: None}
    }
    assert all(group.digest == f"digest {group.position}" for group in batch.refused)
    assert batch.membership.complete and batch.membership.ended_by == "accepted"


def test_an_excluded_group_is_replaced_and_the_recipe_is_not_asked():
    asked = []

    async def generate(prompt, sample, version):
        if prompt.index == 1:
            raise TooLong("prompt is too long")
        return completion("v")

    def accept(group: RolloutGroup) -> str | None:
        asked.append(group.prompt.index)
        return None

    with LoopThread() as thread:
        batch = begin(thread, generate, 2, accept=accept, excluded_by={TooLong: "too_long"})
        assert sorted(positions(batch.updates[0])) == [0, 2]
    assert sorted(asked) == [0, 2]
    [group] = batch.refused
    assert (group.position, group.outcome, group.reason) == (1, "excluded", "prompt is too long")
    assert group.endpoints == [] and group.stamped == []


@pytest.mark.parametrize("limits, ended_by", [({"num_left": 3}, "data"), ({"max_draws": 3}, None)])
def test_a_batch_that_the_order_or_the_bound_cuts_short_ends(limits, ended_by):
    with LoopThread() as thread:
        batch = begin(
            thread,
            ScriptedGenerate(open_indices=range(9)),
            2,
            limits=limits,
            accept=reject(0, 1),
        )
        assert positions(batch.updates[0]) == [2]
    assert batch.membership.ended_by == (ended_by or "max_draws")


def test_a_batch_in_which_everything_is_refused_ends_without_a_group():
    with LoopThread() as thread:
        batch = begin(
            thread,
            ScriptedGenerate(open_indices=range(9)),
            2,
            2,
            limits={"max_draws": 5},
            accept=lambda group: "flat",
        )
        assert [list(stream) for stream in batch.updates] == [[], []]
    assert sorted(group.position for group in batch.refused) == [0, 1, 2, 3, 4]


@settings(BUSY, max_examples=25)
@given(data=st.data())
def test_each_optimizer_step_gets_its_slice_of_the_accepted_groups(data):
    """Whatever the delays, with groups of earlier attempts and of any outcome among them."""
    num_updates = data.draw(st.integers(1, 3))
    batch_size = num_updates * data.draw(st.integers(1, 3))
    rejected = data.draw(st.sets(st.integers(0, 10)))
    in_prompt_order = data.draw(st.booleans())
    recovered = data.draw(st.sets(st.integers(0, batch_size - 1)))
    rng = random.Random(data.draw(st.integers(0, 100)))

    async def generate(prompt, sample, version):
        await asyncio.sleep(rng.random() / 1000)
        return completion("v")

    store = MemoryStore()
    with LoopThread() as thread:
        if recovered:  # an earlier attempt
            whole = begin(thread, generate, 12, store=(full := MemoryStore()), accept=reject())
            list(whole.updates[0])
            for position in recovered:
                reason = "unwanted" if position in rejected else None
                store.groups[0, position] = replace(full.groups[0, position], rejected=reason)
        batch = begin(
            thread,
            generate,
            batch_size,
            num_updates,
            accept=reject(*rejected),
            store=store,
            in_prompt_order=in_prompt_order,
            queue_size=data.draw(st.integers(1, 4)),
            recovered=[(p, store.find(prompt(p))) for p in sorted(recovered)],
        )
        handed_out = [positions(stream) for stream in batch.updates]
    accepted = [p for p in range(30) if p not in rejected][:batch_size]
    size = batch_size // num_updates
    slices = [accepted[i : i + size] for i in range(0, batch_size, size)]
    if in_prompt_order:
        assert handed_out == slices
    else:
        assert [sorted(groups) for groups in handed_out] == slices
    drawn = set(range(accepted[-1] + 1))
    assert {group.position for group in batch.refused} == drawn & rejected
    assert {g.position for g in batch.refused if g.recovered} == recovered & rejected & drawn
    for stream, groups in zip(batch.updates, slices, strict=True):
        assert stream.recovered == {(0, p) for p in recovered.intersection(groups)}


def test_a_group_is_held_back_until_its_optimizer_step_is_certain():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        batch = begin(thread, generate, 4, 2, accept=reject(0), store=MemoryStore())
        first, second = batch.updates
        wait_until(lambda: len(generate.asked) == 4 * G)
        generate.release(thread, 2)  # the second or third that is accepted: either step
        wait_until(lambda: batch.num_waiting == 1)
        time.sleep(0.05)
        assert first.waiting == second.waiting == 0
        generate.release(thread, 0)  # rejected: one of 1 and 2 cannot be in front any more
        wait_until(lambda: first.waiting == 1)
        assert positions(first.drain_ready(1)) == [2]
        wait_until(lambda: (4, 0) in generate.asked)  # in its place
        generate.release(thread, 3)  # if position 1 is accepted too, of the second step
        generate.release(thread, 4)  # of the second step anyway
        wait_until(lambda: batch.num_waiting == 2 and second.waiting == 1)
        assert positions(second.drain_ready(1)) == [4]
        assert first.waiting == second.waiting == 0
        generate.release(thread, 1)
        assert positions(first) == [1] and positions(second) == [3]
    assert batch.membership.complete and batch.num_waiting == 0


def test_in_prompt_order_a_rejected_group_holds_up_those_behind_it_until_it_is_known():
    generate = ScriptedGenerate()
    options = {"accept": reject(0), "in_prompt_order": True, "store": MemoryStore()}
    with LoopThread() as thread:
        batch = begin(thread, generate, 2, **options)
        [stream] = batch.updates
        wait_until(lambda: len(generate.asked) == 2 * G)
        generate.release(thread, 1)
        wait_until(lambda: batch.num_waiting == 1)
        time.sleep(0.05)
        assert stream.waiting == 0
        generate.release(thread, 0)
        wait_until(lambda: stream.waiting == 1)
        wait_until(lambda: (2, 0) in generate.asked)
        generate.release(thread, 2)
        assert positions(stream) == [1, 2]


def test_what_the_store_has_of_a_later_position_is_used_when_it_is_reached():
    """Groups beyond B + R of an earlier attempt: nobody asks for them again."""
    generate, store = ScriptedGenerate(open_indices=range(9)), MemoryStore()
    with LoopThread() as thread:
        list(begin(thread, generate, 4, store=store).updates[0])
        for position in (0, 1, 2):
            del store.groups[0, position]
        generate.asked.clear()
        batch = begin(thread, generate, 3, store=store, accept=reject(1))
        [stream] = batch.updates
        assert sorted(positions(stream)) == [0, 2, 3]
        assert stream.recovered == {(0, 3)}
    assert {index for index, _ in generate.asked} == {0, 1, 2}


def test_a_refused_group_of_an_earlier_attempt_is_told_and_counts():
    store = MemoryStore()
    with LoopThread() as thread:
        list(begin(thread, ScriptedGenerate(range(9)), 2, store=store, accept=reject(1)).updates[0])
        del store.groups[0, 2]
        batch = begin(
            thread,
            generate := ScriptedGenerate(range(9)),
            2,
            store=store,
            recovered=[(p, store.find(prompt(p))) for p in (0, 1)],
        )
        assert sorted(positions(batch.updates[0])) == [0, 2]
    assert {index for index, _ in generate.asked} == {2}
    [group] = batch.refused
    assert (group.position, group.outcome, group.recovered) == (1, "rejected", True)


def test_nobody_looks_ahead_on_a_group_whose_optimizer_step_is_not_certain():
    """Later steps have another old policy."""
    early = {(p, s) for p in range(4) for s in (0, 1)}

    async def generate(prompt, sample, version):
        if (prompt.index, sample) not in early:
            await gates[prompt.index].wait()
        return completion("v")

    with LoopThread() as thread:
        gates = {p: asyncio.Event() for p in range(6)}
        batch = begin(thread, generate, 4, 2, accept=reject(0), store=MemoryStore())
        first, second = (stream.open_samples for stream in batch.updates)

        def seen(samples) -> list[int]:
            return sorted(group.key[1] for group in samples.groups())

        wait_until(lambda: seen(first) == [0, 1])
        time.sleep(0.05)
        assert seen(second) == []  # 2 and 3 are of the second if neither of the others is rejected
        thread.loop.call_soon_threadsafe(gates[0].set)
        wait_until(lambda: seen(first) == [1, 2])
        assert seen(second) == []
        thread.loop.call_soon_threadsafe(gates[1].set)
        wait_until(lambda: seen(first) == [2])
        assert seen(second) == []  # 3 is of the first step if 2 is rejected
        thread.loop.call_soon_threadsafe(gates[2].set)
        wait_until(lambda: seen(second) == [3])
        assert seen(first) == []
        for gate in gates.values():
            thread.loop.call_soon_threadsafe(gate.set)
        assert sorted(p for stream in batch.updates for p in positions(stream)) == [1, 2, 3, 4]
        assert seen(first) == seen(second) == []


@pytest.mark.parametrize("step", [0, 1])
def test_an_error_reaches_whoever_waits_for_a_group_of_any_step(step):
    async def generate(prompt, sample, version):
        if prompt.index == 3:
            raise ValueError("endpoint exploded")
        await asyncio.Event().wait()

    with LoopThread() as thread:
        batch = begin(thread, generate, 4, 2)
        with pytest.raises(ProducerError, match="endpoint exploded"):
            batch.updates[step].drain_ready(100)


def test_an_error_of_the_recipe_ends_the_batch():
    def accept(group: RolloutGroup) -> str | None:
        raise KeyError("no such reward")

    with LoopThread() as thread:
        batch = begin(thread, ScriptedGenerate(open_indices=[0]), 1, accept=accept)
        with pytest.raises(ProducerError, match="no such reward"):
            batch.updates[0].drain_ready(100)


def test_closing_one_step_gives_up_the_whole_batch():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        batch = begin(thread, generate, 4, 2)
        wait_until(lambda: len(generate.asked) == 4 * G)
        waits = threading.Event()

        def second() -> None:
            with pytest.raises(ProducerError):
                batch.updates[1].drain_ready(100)
            waits.set()

        threading.Thread(target=second).start()
        batch.updates[0].close()
        wait_until(lambda: sorted(set(generate.cancelled)) == [0, 1, 2, 3])
        assert waits.wait(10)
        batch.close()  # again
