"""Order of events of the producer, with a generate and a scorer that the test controls."""

import asyncio
import threading
import time

import numpy as np
import pytest

from easyrl.dataloaders.loop_thread import LoopThread
from easyrl.dataloaders.rollout_generator import ProducerError, RolloutGenerator, packed_tokens
from easyrl.schema import Completion, Prompt, Score, VersionSpan

G = 3


def prompt(index: int, length: int = 4) -> Prompt:
    return Prompt(index, np.arange(length, dtype=np.int32), f"q{index}", None)


def completion(version: str, length: int = 5) -> Completion:
    return Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(version, 0, length),),
        endpoint="http://fake",
        loss_mask=np.ones(length, dtype=bool),
    )


class ScriptedGenerate:
    """Answers a request when the test opens its gate; gates of ``open_indices`` are always open."""

    def __init__(self, open_indices=()):
        self.open = set(open_indices)
        self.gates: dict[int, asyncio.Event] = {}
        self.asked: list[tuple[int, int]] = []
        self.cancelled: list[int] = []

    async def __call__(self, prompt: Prompt, sample: int, version: str | None) -> Completion:
        self.asked.append((prompt.index, sample))
        if prompt.index not in self.open:
            gate = self.gates.setdefault(prompt.index, asyncio.Event())
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(prompt.index)
                raise
        return completion(version or "none")

    def release(self, thread: LoopThread, index: int) -> None:
        thread.loop.call_soon_threadsafe(self.gates[index].set)


class SumScorer:
    async def score_sample(self, prompt, completion):
        return float(prompt.index)

    async def score_group(self, prompt, completions, sample_scores):
        return tuple(Score(value, {"sum": value}) for value in sample_scores)


def generator(thread, generate, scorer=None, **options) -> RolloutGenerator:
    return RolloutGenerator(thread, generate, scorer or SumScorer(), num_generations=G, **options)


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the event did not happen"
        time.sleep(0.005)


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
        first = stream.take_ready(max_tokens=1000)
        assert [group.prompt.index for group in first] == [0]  # while prompt 1 still generates
        generate.release(thread, 1)
        assert [group.prompt.index for group in stream.take_ready(1000)] == [1]
        assert stream.take_ready(1000) == []


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
        assert len(stream.take_ready(10_000)) == 2
        assert stream.take_ready(10_000) == []
        assert stream.first_group_wait_s == stream.wait_s


def test_take_ready_respects_the_token_budget_and_loses_nothing():
    generate = ScriptedGenerate(open_indices=range(5))
    with LoopThread() as thread:
        rollouts = generator(thread, generate)
        whole = rollouts.produce([prompt(i) for i in range(5)], "v")
        whole.complete()
        size = 4 + G * 5
        taken = [len(groups) for groups in iter(lambda: whole.take_ready(2 * size), [])]
    assert taken == [2, 2, 1]


def test_a_group_over_the_budget_is_still_delivered():
    generate = ScriptedGenerate(open_indices=range(2))
    with LoopThread() as thread:
        whole = generator(thread, generate).produce([prompt(0), prompt(1)], "v")
        whole.complete()
        assert [len(g) for g in iter(lambda: whole.take_ready(1), [])] == [1, 1]


def test_queue_is_bounded():
    generate = ScriptedGenerate(open_indices=range(8))
    ready = []

    def record(event, **fields):
        if event == "group_ready":
            ready.append(fields["index"])

    with LoopThread() as thread:
        rollouts = generator(thread, generate, queue_size=2, record=record)
        stream = rollouts.produce([prompt(i) for i in range(8)], "v")
        wait_until(lambda: len(generate.asked) == 8 * G and len(ready) == 2)
        time.sleep(0.05)
        assert len(ready) == 2  # the others wait for a place
        assert len(list(stream)) == 8
        assert len(ready) == 8


def test_an_error_in_generate_reaches_the_main_thread_with_its_traceback():
    async def generate(prompt, sample, version):
        raise ValueError("endpoint exploded")

    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0)], "v")
        with pytest.raises(ProducerError, match="endpoint exploded") as caught:
            stream.take_ready(100)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert any(frame.name == "generate" for frame in caught.traceback) or "generate" in str(
        cause.__traceback__.tb_next.tb_frame
    )


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


def test_closing_the_stream_cancels_its_requests():
    generate = ScriptedGenerate()
    with LoopThread() as thread:
        stream = generator(thread, generate).produce([prompt(0)], "v")
        wait_until(lambda: len(generate.asked) == G)
        stream.close()
        wait_until(lambda: generate.cancelled == [0] * G)
        assert stream.take_ready(100) == []


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
