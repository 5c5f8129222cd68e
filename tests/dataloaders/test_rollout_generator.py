"""Order of events of the producer, with a generate and a scorer that the test controls."""

import asyncio
import threading
import traceback
from contextlib import asynccontextmanager

import pytest

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import ProducerError, packed_tokens
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import RewardError
from tests.dataloaders.rollout_parts import (
    G,
    ScriptedGenerate,
    SumScorer,
    completion,
    generator,
    prompt,
)
from tests.waiting import wait_until


def test_groups_arrive_in_order_of_completion():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0), prompt(1), prompt(2)], "v")
        wait_until(lambda: len(generate.asked) == 3 * G)
        order = []
        for index in (2, 0, 1):
            generate.release(thread, index)
            order.append(next(iter(stream)).prompt.index)
    assert order == [2, 0, 1]


def test_requests_are_sent_prompt_by_prompt():
    generate = ScriptedGenerate(open_indices=range(4))
    with LoopThread() as thread:
        list(generator(thread, generate).produce([prompt(i) for i in range(4)], "v"))
    assert generate.asked == [(index, sample) for index in range(4) for sample in range(G)]


def test_first_group_is_there_before_the_last_response_exists():
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0), prompt(1)], "v")
        first = stream.drain_ready(max_tokens=1000)
        assert [group.prompt.index for group in first] == [0]  # while prompt 1 still generates
        generate.release(thread, 1)
        assert [group.prompt.index for group in stream.drain_ready(1000)] == [1]
        assert stream.drain_ready(1000) == []


def test_complete_waits_for_the_whole_batch():
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0), prompt(1)], "v")
        done = []
        waiter = threading.Thread(target=lambda: (stream.complete(), done.append(True)))
        waiter.start()
        wait_until(lambda: len(generate.asked) == 2 * G)
        assert not done
        generate.release(thread, 1)
        waiter.join(timeout=10)
        assert done
        assert len(stream.drain_ready(10_000)) == 2
        assert stream.drain_ready(10_000) == []
        assert stream.first_group_wait_s == stream.wait_s


def test_drain_ready_respects_the_token_budget_and_loses_nothing():
    generate = ScriptedGenerate(open_indices=range(5))
    with LoopThread() as thread:
        rollouts = generator(thread, generate)
        whole = rollouts.produce([prompt(i) for i in range(5)], "v")
        whole.complete()
        size = 4 + G * 5
        taken = [len(groups) for groups in iter(lambda: whole.drain_ready(2 * size), [])]
    assert taken == [2, 2, 1]


def test_a_group_over_the_budget_is_still_delivered():
    generate = ScriptedGenerate(open_indices=range(2))
    with LoopThread() as thread:
        whole = generator(thread, generate).produce([prompt(0), prompt(1)], "v")
        whole.complete()
        assert [len(g) for g in iter(lambda: whole.drain_ready(1), [])] == [1, 1]


def test_an_error_in_generate_reaches_the_main_thread_with_its_traceback():
    async def generate(prompt, sample, version):
        raise ValueError("endpoint exploded")

    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0)], "v")
        with pytest.raises(ProducerError, match="endpoint exploded") as caught:
            stream.drain_ready(100)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    frames = [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    assert frames[-1] == "generate"


def test_a_reward_that_fails_reaches_the_main_thread_as_it_is():
    async def generate(prompt, sample, version):
        raise RewardError("rewards[0]: no judge")

    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0)], "v")
        with pytest.raises(RewardError, match=r"^rewards\[0\]: no judge$"):
            stream.drain_ready(100)


def test_an_error_in_one_group_cancels_the_others():
    scripted = ScriptedGenerate()

    async def generate(prompt, sample, version):
        if prompt.index == 1:
            while len(scripted.asked) < G:
                await asyncio.sleep(0)
            raise ValueError("bad reward")
        return await scripted(prompt, sample, version)

    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0), prompt(1)], "v")
        with pytest.raises(ProducerError, match="bad reward"):
            list(stream)
    assert scripted.cancelled == [0] * G


class TooLong(Exception):
    pass


def test_a_prompt_that_cannot_be_had_is_a_value_and_the_others_go_on():
    scripted = ScriptedGenerate(open_indices=range(3))

    async def generate(prompt, sample, version):
        if prompt.index == 1 and sample == 2:
            raise TooLong("300 tokens leave no room")
        return await scripted(prompt, sample, version)

    with LoopThread() as thread:
        rollouts = generator(thread, generate, excluded_by={TooLong: "too_long"})
        groups = list(rollouts.produce([prompt(i) for i in range(3)], "v"))
    by_index = {group.prompt.index: group for group in groups}
    assert sorted(by_index) == [0, 1, 2]
    assert by_index[1].excluded == ("too_long", "300 tokens leave no room")
    assert by_index[1].completions == () and by_index[1].scores == ()
    assert by_index[1].rewards.shape == (0,) and packed_tokens(by_index[1]) == 4
    assert by_index[0].excluded is None and len(by_index[2].completions) == G


def test_an_error_of_the_run_goes_before_one_of_the_prompt():
    both = asyncio.Event()

    async def generate(prompt, sample, version):
        if sample == 0:
            both.set()
            raise TooLong("too long")
        if sample == 1:
            await both.wait()
            raise ValueError("no endpoint")
        return completion("v")

    with LoopThread() as thread:
        stream = generator(thread, generate, excluded_by={TooLong: "too_long"}).produce(
            [prompt(0)], "v"
        )
        with pytest.raises(ProducerError, match="no endpoint"):
            list(stream)


def test_the_cause_of_an_error_survives():
    async def generate(prompt, sample, version):
        raise ValueError("attempts failed") from KeyError("the last attempt")

    with LoopThread() as thread:
        with pytest.raises(ProducerError) as caught:
            list(generator(thread, generate).produce([prompt(0)], "v"))
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


def test_samples_are_asked_for_in_the_turn_of_their_group_and_it_ends_with_them():
    scripted = ScriptedGenerate()
    turns: dict[int, asyncio.Event] = {}
    left: list[int] = []

    @asynccontextmanager
    async def begin_group(prompt, version, priority):
        turns[prompt.index] = asyncio.Event()
        await turns[prompt.index].wait()
        try:
            yield lambda sample: scripted(prompt, sample, version)
        finally:
            left.append(prompt.index)

    with LoopThread() as thread:
        rollouts = RolloutGenerator(thread, begin_group, SumScorer(), num_generations=G)
        stream = rollouts.produce([prompt(0), prompt(1)], "v")
        wait_until(lambda: len(turns) == 2)
        thread.loop.call_soon_threadsafe(turns[1].set)
        wait_until(lambda: len(scripted.asked) == G)
        assert {index for index, _ in scripted.asked} == {1} and left == []
        scripted.release(thread, 1)
        assert stream.drain_ready(100)[0].prompt.index == 1
        assert left == [1]


def test_every_group_asks_for_its_turn_with_the_priority_of_its_optimizer_step():
    asked = []

    @asynccontextmanager
    async def begin_group(prompt, version, priority):
        asked.append((prompt.index, version, priority))

        async def sample(number):
            return completion(version)

        yield sample

    with LoopThread() as thread:
        rollouts = RolloutGenerator(thread, begin_group, SumScorer(), num_generations=G)
        batch = rollouts.produce_batch(Draws(BatchMembership(2, num_updates=2)), prompt, "v")
        for stream in batch.updates:
            stream.complete()
    assert sorted(asked) == [(0, "v", 0), (1, "v", 1)]


def test_closing_the_stream_cancels_its_requests():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0)], "v")
        wait_until(lambda: len(generate.asked) == G)
        stream.close()
        wait_until(lambda: generate.cancelled == [0] * G)
        assert stream.drain_ready(100) == []


def test_leaving_the_thread_cancels_what_runs_and_leaves_no_thread():
    generate = ScriptedGenerate()
    with LoopThread("easyrl-test-loop") as thread:
        generator(thread, generate).produce([prompt(0)], "v")
        wait_until(lambda: len(generate.asked) == G)
    assert generate.cancelled == [0] * G
    assert "easyrl-test-loop" not in [t.name for t in threading.enumerate()]


def test_packed_tokens_counts_the_prompt_once():
    generate = ScriptedGenerate(open_indices=[0])
    with LoopThread() as thread:
        group = next(iter(generator(thread, generate).produce([prompt(0, length=7)], "v")))
    assert packed_tokens(group) == 7 + G * 5
