"""Finished responses of open groups, and a consumer that works on them while it would wait."""

import asyncio
import gc
import itertools
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from easyrl.dataloaders.producer import group_stream
from easyrl.dataloaders.producer.group_stream import ProducerError, packed_tokens
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import OpenGroup
from tests.dataloaders.rollout_parts import (
    G,
    MemoryStore,
    ScriptedGenerate,
    SumScorer,
    completion,
    generator,
    produce,
    prompt,
)
from tests.waiting import wait_until


class SampleGates:
    """Answers a request when the test opens the gate of its sample."""

    def __init__(self):
        self.gates = {}
        self.asked = []

    async def __call__(self, prompt, sample, version):
        gate = self.gates.setdefault((prompt.index, sample), asyncio.Event())
        self.asked.append((prompt.index, sample))
        await gate.wait()
        return completion("v", 5 + sample)

    def release(self, thread, *samples):
        for sample in samples:
            thread.loop.call_soon_threadsafe(self.gates[sample].set)


def batch(thread, generate, count=2, **options):
    """A stream whose requests have all been sent."""
    stream = generator(thread, generate, **options).produce([prompt(i) for i in range(count)], "v")
    wait_until(lambda: len(generate.asked) == count * G)
    return stream


def taken(samples: OpenSamples, index: int, max_tokens: int = 1000) -> list[int]:
    found = samples.take((0, index), max_tokens)
    if found is None:
        return []
    assert found.prompt.index == index
    assert all(len(c.token_ids) == 5 + sample for sample, c in found.completions.items())
    return list(found.completions)


def test_a_response_is_there_once_and_only_while_its_group_is_open():
    generate = SampleGates()
    with LoopThread() as thread:
        stream = batch(thread, generate)
        samples = stream.open_samples
        assert samples.groups() == [] and taken(samples, 0) == []
        generate.release(thread, (0, 2), (1, 0), (0, 1))
        wait_until(lambda: sum(sum(group.finished) for group in samples.groups()) == 18)
        assert sorted(samples.groups()) == [
            OpenGroup((0, 0), 4, (7, 6), num_missing=1),
            OpenGroup((0, 1), 4, (5,), num_missing=2),
        ]
        assert taken(samples, 0) == [2, 1]  # in order of return
        assert taken(samples, 0) == []
        assert samples.groups() == [OpenGroup((0, 1), 4, (5,), num_missing=2)]
        generate.release(thread, (1, 1), (1, 2))
        assert stream.drain_ready(1000)[0].prompt.index == 1
        assert samples.groups() == [] and taken(samples, 1) == []


def test_what_is_taken_fits():
    samples = OpenSamples(4)
    for sample, length in enumerate((9, 3, 4, 2)):
        samples.add(prompt(0), sample, completion("v", length))
    [group] = samples.groups()
    assert group.within(8) == [1, 2] and group.within(100) == [0, 1, 2, 3]
    assert sum(group.finished) == 18 and group.within(1) == []
    found = samples.take((0, 0), 8)
    assert found is not None and list(found.completions) == [1, 2]
    assert samples.groups() == [OpenGroup((0, 0), 4, (9, 2), num_missing=0)]
    assert samples.take((0, 0), 1) is None


def test_a_group_is_open_until_it_is_scored():
    scored = asyncio.Event()

    class Slow(SumScorer):
        async def score_group(self, prompt, completions, sample_scores):
            await scored.wait()
            return await super().score_group(prompt, completions, sample_scores)

    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        stream = generator(thread, generate, Slow()).produce([prompt(0)], "v")
        wait_until(lambda: len(stream.open_samples.groups()) == 1)
        wait_until(lambda: stream.open_samples.groups()[0].num_missing == 0)
        thread.loop.call_soon_threadsafe(scored.set)
        assert len(stream.drain_ready(1000)) == 1
        assert stream.open_samples.groups() == []


def test_the_consumer_works_only_while_it_would_wait_and_each_return_wakes_it(monkeypatch):
    """Event by event: the producer goes on when the consumer says what it has seen."""
    monkeypatch.setattr(group_stream, "WAIT_FOR_MORE", 0.0)  # it would look once more
    generate, seen, events = SampleGates(), [], []

    def idle() -> bool:
        found = [(g.key[1], s) for g in samples.groups() for s in taken(samples, g.key[1])]
        seen.append(found)
        if not found and script:  # nothing to do: from here on the consumer blocks
            generate.release(thread, *script.pop(0))
        return bool(found)

    with LoopThread() as thread:
        stream = batch(thread, generate, record=lambda event, **fields: events.append(event))
        samples = stream.open_samples
        script = [[(1, 0)], [(0, 1)], [(1, 1)], [(1, 2)]]
        assert [g.prompt.index for g in stream.drain_ready(1000, idle)] == [1]
        # The last response and its group may be seen as one or as two events.
        assert seen[:7] == [[], [(1, 0)], [], [(0, 1)], [], [(1, 1)], []]
        assert seen[7:] in ([], [[]], [[(1, 2)]], [[(1, 2)], []])
        seen.clear()
        generate.release(thread, (0, 0), (0, 2))
        wait_until(lambda: events.count("group_ready") == 2)
        thread.run(asyncio.sleep(0))  # the producer has done what it had to do
        assert [g.prompt.index for g in stream.drain_ready(1000, idle)] == [0]
        assert stream.drain_ready(1000, idle) == []
        assert seen == []  # a group was ready, then none was to come


def test_work_is_no_waiting(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(group_stream, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    generate = SampleGates()

    def idle() -> bool:
        list(itertools.islice(clock, 100))  # so long a piece of work
        if len(units) < 5:
            units.append(None)
            return True
        generate.release(thread, *((0, sample) for sample in range(G)))
        return False

    units = []
    with LoopThread() as thread:
        stream = batch(thread, generate, count=1)
        stream.drain_ready(1000, idle)
    assert len(units) == 5 and 0 < stream.wait_s < 30  # a tick for each look at the queue


def test_an_interrupt_is_heard_between_two_pieces_of_work():
    class Stop(Exception):
        pass

    pieces = []

    def idle() -> bool:
        pieces.append(None)
        if len(pieces) == 3:
            stream.interrupt(Stop())
        assert len(pieces) < 4
        return True

    with LoopThread() as thread:
        stream = batch(thread, SampleGates())
        with pytest.raises(Stop):
            stream.drain_ready(1000, idle)
    assert len(pieces) == 3


def test_a_failure_is_heard_between_two_pieces_of_work():
    generate = SampleGates()

    async def fails(prompt, sample, version):
        await generate(prompt, sample, version)
        raise ValueError("endpoint exploded")

    def idle() -> bool:
        generate.release(thread, (0, 0))
        return True

    with LoopThread() as thread:
        stream = generator(thread, fails).produce([prompt(0)], "v")
        wait_until(lambda: len(generate.asked) == G)
        with pytest.raises(ProducerError, match="endpoint exploded"):
            stream.drain_ready(1000, idle)
        assert stream.open_samples.groups() == []


def test_an_excluded_group_leaves_nothing_behind():
    class TooLong(Exception):
        pass

    generate = SampleGates()

    async def excludes(prompt, sample, version):
        result = await generate(prompt, sample, version)
        if sample == 1:
            raise TooLong
        return result

    with LoopThread() as thread:
        stream = generator(thread, excludes, excluded_by={TooLong: "too_long"}).produce(
            [prompt(0)], "v"
        )
        wait_until(lambda: len(generate.asked) == G)
        generate.release(thread, (0, 0))
        wait_until(lambda: len(stream.open_samples.groups()) == 1)
        generate.release(thread, (0, 1))
        [group] = stream.drain_ready(1000)
        assert group.excluded is not None and stream.open_samples.groups() == []
        assert taken(stream.open_samples, 0) == []


def test_nobody_is_woken_who_does_not_listen():
    generate = SampleGates()
    with LoopThread() as thread:
        stream = batch(thread, generate)
        generate.release(thread, *((i, s) for i in range(2) for s in range(G - 1)))
        wait_until(lambda: sum(G - g.num_missing for g in stream.open_samples.groups()) == 2 * 2)
        queued = stream._ready.qsize
        assert stream.waiting == queued() == 0
        stream.open_samples.listen()
        generate.release(thread, (0, G - 1))
        wait_until(lambda: queued() == 2)  # the wake-up and the group
        assert stream.waiting == 1
        generate.release(thread, (1, G - 1))
        wait_until(lambda: queued() == 4)  # the group and the end; it listened once
        assert stream.waiting == 2 and len(stream.drain_ready(1000)) == 2
        assert stream.waiting == 0


def test_recovered_groups_are_never_open():
    store, generate = MemoryStore(), ScriptedGenerate(open_indices=[0, 1])
    prompts = [prompt(0), prompt(1)]
    with LoopThread() as thread:
        produce(generator(thread, generate), prompts, "v", store=store).complete()
        stream = produce(generator(thread, generate), prompts, "v", store=store)
        assert stream.open_samples.groups() == []
        assert len(stream.drain_ready(1000, lambda: pytest.fail("nothing to wait for"))) == 2


@pytest.mark.parametrize("looks", [True, False])
def test_a_response_lives_no_longer_than_its_group(looks):
    """Groups that nobody takes wait on disk; their responses must not stay in memory."""
    made = []  # of every response a weak reference

    class OnDisk(NamedTuple):
        num_tokens: int

    class Disk(MemoryStore):
        def add(self, group):
            return group, OnDisk(packed_tokens(group))

    async def generate(prompt, sample, version):
        response = completion("v", 5)
        made.append(weakref.ref(response.token_ids))
        return response

    with LoopThread() as thread:
        rollouts = generator(thread, generate, queue_size=2)
        stream = produce(rollouts, [prompt(i) for i in range(20)], "v", store=Disk())
        if looks:
            for group in stream.open_samples.groups():
                stream.open_samples.take(group.key, 1000)
        wait_until(lambda: stream.waiting == 20)
        wait_until(lambda: gc.collect() >= 0 and sum(r() is not None for r in made) <= 2 * G)
        assert stream.open_samples.groups() == []


def test_threads_that_add_take_and_close_lose_and_double_nothing():
    samples, wakes = OpenSamples(G, wake=lambda: wakes.append(None)), []
    prompts = [prompt(index) for index in range(200)]
    got, finished, start = [], threading.Event(), threading.Barrier(4)
    moved_on = []  # how many responses the takers had when each adder was halfway

    def add(own):
        start.wait(timeout=30)
        for number, each in enumerate(own):
            for sample in range(G):
                samples.add(each, sample, completion("v", 5 + sample))
            if each.index % 3 == 0:
                samples.close_group(each)
            if number == len(own) // 2:
                wait_until(lambda: got)  # the takers are at work while the second half comes
                moved_on.append(len(got))

    def take():
        start.wait(timeout=30)
        while True:
            last = finished.is_set()
            samples.listen()
            for group in samples.groups():
                assert 0 <= group.num_missing < G
                if (found := samples.take(group.key, 1000)) is not None:
                    got.extend((group.key[1], sample) for sample in found.completions)
            if last:
                return

    adders = [threading.Thread(target=add, args=(prompts[i::2],)) for i in range(2)]
    takers = [threading.Thread(target=take) for _ in range(2)]
    samples.listen()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*takers, *adders):
            thread.start()
        for thread in adders:
            thread.join(timeout=30)
        finished.set()
        for thread in takers:
            thread.join(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in (*adders, *takers))
    assert len(moved_on) == 2 and min(moved_on) < len(got)
    assert len(got) == len(set(got))
    kept = {(p.index, s) for p in prompts if p.index % 3 for s in range(G)}
    assert kept <= set(got) and samples.groups() == []
    assert wakes
