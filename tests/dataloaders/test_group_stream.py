"""A store behind the stream, groups in the order of their prompts, and interruptions."""

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.producer import group_stream
from easyrl.dataloaders.producer.group_stream import ProducerError, packed_tokens
from easyrl.runtime.loop_thread import LoopThread
from tests.dataloaders.packed_rows import BUSY
from tests.dataloaders.rollout_parts import (
    G,
    MemoryStore,
    ScriptedGenerate,
    completion,
    generator,
    produce,
    prompt,
)
from tests.waiting import wait_until


def prompts(count: int):
    return [prompt(index) for index in range(count)]


def indices(groups) -> list[int]:
    return [group.prompt.index for group in groups]


@contextmanager
def stored(count: int):
    """A store that an earlier attempt has left with the first ``count`` groups."""
    store = MemoryStore()
    generate = ScriptedGenerate(open_indices=range(count))
    with LoopThread() as thread:
        produce(generator(thread, generate), prompts(count), "old", store=store).complete()
    store.loads.clear()
    store.flushes = 0
    yield store


def test_recovered_groups_are_ready_at_once_and_only_the_missing_are_asked_for():
    events = []
    generate = ScriptedGenerate()
    with stored(2) as store, LoopThread() as thread:
        rollouts = generator(
            thread, generate, record=lambda event, **f: events.append((event, f.get("index")))
        )
        stream = produce(rollouts, prompts(3), "new", store=store)
        assert stream.recovered == {(0, 0), (0, 1)}
        assert stream.waiting == 2
        first = stream.drain_ready(10_000)
        assert indices(first) == [0, 1]
        assert [group.policy_version for group in first] == ["old", "old"]
        wait_until(lambda: len(generate.asked) == G)
        generate.release(thread, 2)
        [last] = stream.drain_ready(10_000)
        assert last.prompt.index == 2 and last.digest == "digest 2"
        assert stream.drain_ready(10_000) == [] and stream.waiting == 0
        assert {index for index, _ in generate.asked} == {2}
        wait_until(lambda: store.flushes == 1)
    recovered = [index for event, index in events if event == "group_recovered"]
    ready = [index for event, index in events if event == "group_ready"]
    assert (recovered, ready) == ([0, 1], [2])


@pytest.mark.parametrize("in_prompt_order", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_with_a_store_memory_is_bounded_and_nothing_else_waits(in_prompt_order, complete):
    generate, store = ScriptedGenerate(open_indices=range(8)), MemoryStore()
    with LoopThread() as thread:
        rollouts = generator(thread, generate, queue_size=3, in_prompt_order=in_prompt_order)
        stream = produce(rollouts, prompts(8), "v", store=store)
        if complete:
            stream.complete()
        wait_until(lambda: stream.waiting == 8)  # all are finished though none was taken
        assert len(store.groups) == 8 and store.loads == []
        assert sorted(indices(stream)) == list(range(8))
        assert len(store.loads) == 5  # three were in memory, each of the others was read once
        assert len(set(store.loads)) == 5
        assert stream.waiting == 0


def test_a_place_in_memory_is_free_again_when_its_group_was_handed_out():
    generate, store = ScriptedGenerate(open_indices=[0]), MemoryStore()
    with LoopThread() as thread:
        stream = produce(generator(thread, generate, queue_size=1), prompts(2), "v", store=store)
        assert indices(stream.drain_ready(1)) == [0]
        generate.release(thread, 1)
        assert indices(stream.drain_ready(1)) == [1]
    assert store.loads == []


def test_a_slow_disk_holds_up_neither_the_loop_nor_the_other_requests():
    generate, store = ScriptedGenerate(open_indices=range(4)), MemoryStore()
    store.free.clear()
    with LoopThread() as thread:
        stream = produce(generator(thread, generate), prompts(4), "v", store=store)
        wait_until(lambda: len(generate.asked) == 4 * G)  # all go on while the disk is busy
        thread.run(asyncio.sleep(0))  # the loop answers before the disk does
        assert not store.free.is_set() and store.groups == {} and stream.waiting == 0
        store.free.set()
        assert sorted(indices(stream)) == list(range(4))


def test_a_store_that_fails_ends_the_batch():
    class Full(MemoryStore):
        def add(self, group):
            raise OSError("No space left on device")

    with LoopThread() as thread:
        stream = produce(generator(thread, ScriptedGenerate([0])), [prompt(0)], "v", store=Full())
        for _ in range(2):  # and stays ended
            with pytest.raises(ProducerError, match="No space left on device"):
                stream.drain_ready(100)


def test_in_prompt_order_groups_wait_for_those_before_them():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        stream = generator(thread, generate, in_prompt_order=True).produce(prompts(3), "v")
        wait_until(lambda: len(generate.asked) == 3 * G)
        taken = []
        consumer = threading.Thread(target=lambda: taken.extend(indices(stream)))
        consumer.start()
        generate.release(thread, 2)
        generate.release(thread, 1)
        time.sleep(0.05)
        assert taken == []
        generate.release(thread, 0)
        consumer.join(timeout=10)
    assert taken == [0, 1, 2]


def test_in_prompt_order_a_micro_batch_waits_to_know_whether_the_next_group_fits():
    generate = ScriptedGenerate(open_indices=[0])
    size = 4 + G * 5
    with LoopThread() as thread:
        stream = generator(thread, generate, in_prompt_order=True).produce(prompts(3), "v")
        taken = []
        consumer = threading.Thread(target=lambda: taken.append(stream.drain_ready(2 * size)))
        consumer.start()
        wait_until(lambda: len(generate.asked) == 3 * G)
        time.sleep(0.05)
        assert not taken  # one group is ready, and two would fit
        generate.release(thread, 1)
        time.sleep(0.05)
        assert not taken  # the third might be small enough too
        generate.release(thread, 2)
        consumer.join(timeout=10)
        assert indices(taken[0]) == [0, 1]
        assert indices(stream.drain_ready(2 * size)) == [2]


@settings(BUSY, max_examples=25)
@given(data=st.data())
def test_micro_batches_in_prompt_order_depend_on_order_and_sizes_alone(data):
    """Random delays, recovered groups, modes and places in memory: the same cuts every time."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    budget = data.draw(st.integers(1, 80))
    recovered = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    rng = random.Random(data.draw(st.integers(0, 100)))

    async def generate(prompt, sample, version):
        await asyncio.sleep(rng.random() / 1000)
        return completion("v", lengths[prompt.index])

    def cuts(store, synchronous) -> list[list[int]]:
        rollouts = generator(thread, generate, queue_size=queue_size, in_prompt_order=True)
        stream = produce(rollouts, prompts(len(lengths)), "v", store=store)
        if synchronous:
            stream.complete()
        return [indices(groups) for groups in iter(lambda: stream.drain_ready(budget), [])]

    queue_size = data.draw(st.integers(1, 4))
    expected: list[list[int]] = []  # greedy, in order
    sizes = [4 + G * length for length in lengths]
    for index, size in enumerate(sizes):
        if expected and sum(sizes[i] for i in expected[-1]) + size <= budget:
            expected[-1].append(index)
        else:
            expected.append([index])
    with LoopThread() as thread:
        assert cuts(None, synchronous=False) == expected
        store = MemoryStore()
        earlier = [prompt(index) for index in sorted(recovered)]
        produce(generator(thread, generate), earlier, "v", store=store).complete()
        assert cuts(store, synchronous=data.draw(st.booleans())) == expected


def test_recovered_groups_count_with_their_tokens():
    with stored(3) as store, LoopThread() as thread:
        stream = produce(generator(thread, ScriptedGenerate()), prompts(3), "v", store=store)
        size = packed_tokens(store.groups[0, 0])
        assert [len(g) for g in iter(lambda: stream.drain_ready(2 * size), [])] == [2, 1]


@pytest.mark.parametrize("in_prompt_order", [False, True])
def test_groups_that_are_named_are_waited_for_and_come_in_the_order_named(in_prompt_order):
    generate = ScriptedGenerate(open_indices=[0, 1, 3])
    with LoopThread() as thread:
        rollouts = generator(thread, generate, in_prompt_order=in_prompt_order)
        stream = rollouts.produce(prompts(5), "v")
        # in prompt order the last one is held back by the producer until those before it are there
        wait_until(lambda: stream.waiting == (2 if in_prompt_order else 3))
        threading.Timer(0.05, generate.release, (thread, 2)).start()
        assert indices(stream.drain([(0, 2), (0, 0)])) == [2, 0]
        assert indices(stream.drain_ready(1)) == [1]
        stream.close()
        assert stream.drain([(0, 3)]) == []


class Stop(Exception):
    pass


@pytest.mark.parametrize("ask", ["drain_ready", "take", "complete", "iterate"])
def test_an_interrupt_wakes_who_waits_with_the_error_itself(ask):
    generate, error, raised = ScriptedGenerate(), Stop("SIGTERM"), []

    def consume():
        try:
            match ask:
                case "drain_ready":
                    stream.drain_ready(100)
                case "take":
                    stream.drain([(0, 1)])
                case "complete":
                    stream.complete()
                case "iterate":
                    list(stream)
        except Stop as caught:
            raised.append(caught)

    with LoopThread() as thread:
        stream = generator(thread, generate).produce(prompts(2), "v")
        consumer = threading.Thread(target=consume)
        consumer.start()
        wait_until(lambda: len(generate.asked) == 2 * G)
        stream.interrupt(error)
        consumer.join(timeout=10)
    assert len(raised) == 1 and raised[0] is error


def test_an_interrupt_is_raised_before_groups_that_are_ready_and_before_a_failure():
    async def generate(prompt, sample, version):
        if prompt.index == 1:
            raise ValueError("endpoint exploded")
        return completion("v")

    with LoopThread() as thread:
        stream = generator(thread, generate).produce(prompts(2), "v")
        wait_until(lambda: stream.waiting >= 1)
        stream.interrupt(Stop("SIGTERM"))
        for _ in range(2):
            with pytest.raises(Stop):
                stream.drain_ready(100)
        stream.close()
        assert stream.drain_ready(100) == []


def test_an_interrupt_from_a_signal_handler_wakes_the_main_thread():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        stream = generator(thread, generate).produce(prompts(1), "v")
        before = signal.signal(signal.SIGUSR1, lambda *_: stream.interrupt(Stop("SIGUSR1")))
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Stop):
                stream.drain_ready(100)  # this thread waits; the handler runs in it
        finally:
            signal.signal(signal.SIGUSR1, before)


WAITED_S = 60.0  # so that the first row waits 30 s for more
GROUP_TOKENS = 4 + 5 * G


@contextmanager
def with_one_ready(count: int):
    """A stream of ``count`` groups that has waited long for the first, which alone is ready."""
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        stream = generator(thread, generate).produce(prompts(count), "v")
        wait_until(lambda: stream.waiting == 1)
        stream.wait_s = WAITED_S
        yield stream, lambda index: generate.release(thread, index)


def test_the_first_row_waits_for_more_until_all_are_there():
    with with_one_ready(2) as (stream, release):
        threading.Timer(0.3, release, [1]).start()
        assert indices(stream.drain_ready(10_000)) == [0, 1]
        assert stream.first_group_wait_s == pytest.approx(WAITED_S, abs=0.1)  # it was there by then
        assert stream.wait_s > WAITED_S + 0.2


def test_the_first_row_waits_for_no_more_than_enough_for_one():
    with with_one_ready(3) as (stream, release):
        threading.Timer(0.3, release, [1]).start()
        assert indices(stream.drain_ready(32 * GROUP_TOKENS)) == [0, 1]
        release(2)
        assert indices(stream.drain_ready(32 * GROUP_TOKENS)) == [2]


@pytest.mark.parametrize("tokens", [1, 16])
def test_where_there_is_enough_for_a_row_nothing_is_waited_for(tokens):
    with with_one_ready(2) as (stream, release):
        assert indices(stream.drain_ready(tokens * GROUP_TOKENS)) == [0]
        assert stream.wait_s < WAITED_S + 5
        release(1)
        assert indices(stream.drain_ready(10_000)) == [1]


def test_groups_that_follow_at_once_are_waited_for_where_there_is_enough(monkeypatch):
    monkeypatch.setattr(group_stream, "AT_ONCE_S", 5.0)  # a busy machine does not matter
    with with_one_ready(4) as (stream, release):
        threading.Timer(0.3, release, [1]).start()
        threading.Timer(0.6, release, [2]).start()
        threading.Timer(0.9, release, [3]).start()
        assert indices(stream.drain_ready(16 * GROUP_TOKENS)) == [0, 1, 2, 3]
        assert stream.wait_s < WAITED_S + 5


def test_later_rows_do_not_wait_for_more():
    with with_one_ready(3) as (stream, release):
        assert indices(stream.drain_ready(1)) == [0]
        release(1)
        wait_until(lambda: stream.waiting == 1)
        assert indices(stream.drain_ready(10_000)) == [1]
        release(2)
        assert indices(stream.drain_ready(10_000)) == [2]


def test_the_first_row_waits_half_as_long_again_as_for_the_first_group():
    with with_one_ready(2) as (stream, release):
        stream.wait_s = 0.9
        assert indices(stream.drain_ready(10_000)) == [0]
        assert 1.3 <= stream.wait_s < 6
        release(1)
        assert indices(stream.drain_ready(10_000)) == [1]


def test_while_it_waits_for_more_other_work_is_done():
    pieces = []

    def idle() -> bool:
        pieces.append(None)
        if len(pieces) == 3:
            release(1)
        return len(pieces) < 4

    with with_one_ready(2) as (stream, release):
        assert indices(stream.drain_ready(10_000, idle)) == [0, 1]
    assert len(pieces) >= 3


def test_a_limit_that_has_all_but_passed_ends():
    """``SimpleQueue.get`` alone hangs in one of some thousand tries."""
    found: list[bool] = []

    def receive() -> None:
        for _ in range(30_000):
            found.append(group_stream.GroupStream(lambda: None)._receive(True, limit_s=1e-9))

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    receiving.join(60)
    assert not receiving.is_alive()
    assert len(found) == 30_000 and not any(found)


def test_an_interrupt_ends_the_waiting_for_more():
    with with_one_ready(2) as (stream, _):
        threading.Timer(0.3, stream.interrupt, [Stop("SIGTERM")]).start()
        with pytest.raises(Stop):
            stream.drain_ready(10_000)
        stream.close()


def test_a_group_is_queued_from_its_last_score_until_it_is_taken():
    told: list[tuple[str, float, float, int]] = []
    generate = ScriptedGenerate(open_indices=[1])

    def span(name, start_s, end_s, **args):
        if name in ("group", "queued"):
            told.append((name, start_s, end_s, args["index"]))

    with LoopThread() as thread:
        rollouts = generator(thread, generate, in_prompt_order=True, span=span)
        stream = produce(rollouts, prompts(2), "v", store=MemoryStore())
        wait_until(lambda: ("group", 1) in {(name, index) for name, *_, index in told})
        time.sleep(0.1)
        generate.release(thread, 0)
        stream.complete()
        time.sleep(0.05)  # the trainer is busy
        taken = [(group.prompt.index, time.monotonic()) for group in stream]
    assert [index for index, _ in taken] == [0, 1]
    spans = {(name, index): (start_s, end_s) for name, start_s, end_s, index in told}
    for index, taken_s in taken:
        since_s, until_s = spans["queued", index]
        assert 0 <= since_s - spans["group", index][1] < 0.02
        assert until_s <= taken_s and until_s - since_s >= 0.05
    assert spans["queued", 1][1] - spans["queued", 1][0] >= 0.15  # behind the one before it


def test_a_recovered_group_is_queued_from_when_it_is_here():
    told = []
    with stored(1) as store, LoopThread() as thread:
        begun_s = time.monotonic()
        rollouts = generator(
            thread, ScriptedGenerate(), span=lambda name, *times, **_: told.append((name, *times))
        )
        stream = produce(rollouts, prompts(1), "new", store=store)
        assert len(list(stream)) == 1
    [(name, since_s, until_s)] = told
    assert name == "queued" and begun_s <= since_s <= until_s
