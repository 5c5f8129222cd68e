"""The look-ahead benchmark plays what it says it plays."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.look_ahead import Batch, PlayedStream, Return, Workload, random_batch

WORK = Workload(num_prompts=3, num_generations=2)


class Clock:
    """Passes only where the test or a wait says so."""

    now = 0.0

    def wait_until(self, moment: float) -> float:
        waited = max(0.0, moment - self.now)
        self.now += waited
        return waited


def played(*lengths: tuple[int, int]) -> Batch:
    """Three groups of two responses of these lengths, a second per token."""
    batch = random_batch(WORK, seed=0)
    cut = [
        [replace(c, token_ids=c.token_ids[:1].repeat(n)) for c, n in zip(group, own, strict=True)]
        for group, own in zip(batch.completions, lengths, strict=True)
    ]
    return replace(batch, completions=cut)


def test_responses_take_places_in_the_order_of_their_prompts() -> None:
    batch = played((4, 1), (2, 2), (3, 1))
    assert list(batch.returns(2)) == [
        Return(1, 0, 1),
        Return(3, 1, 0),
        Return(4, 0, 0),
        Return(5, 1, 1),
        Return(6, 2, 1),
        Return(7, 2, 0),
    ]
    assert [r.moment for r in batch.returns(6)] == [1, 1, 2, 2, 3, 4]


def test_a_consumer_that_computes_nothing_waits_for_the_whole_generation() -> None:
    clock = Clock()
    stream = PlayedStream(played((4, 1), (2, 2), (3, 1)), 2, clock)  # type: ignore[arg-type]
    taken = [
        [g.prompt.index for g in ready] for ready in iter(lambda: stream.drain_ready(10**6), [])
    ]
    assert taken == [[0], [1], [2]] and stream.wait_s == clock.now == 7


def test_what_returned_while_the_consumer_computed_is_there_when_it_looks() -> None:
    clock = Clock()
    stream = PlayedStream(played((4, 1), (2, 2), (3, 1)), 2, clock)  # type: ignore[arg-type]
    clock.now = 5.5
    assert [g.prompt.index for g in stream.drain_ready(10**6)] == [0, 1]
    assert stream.wait_s == 0
    seen = []

    def idle() -> bool:
        seen.append([group.num_missing for group in stream.open_samples.groups()])
        clock.now += 0.75
        return len(seen) == 1

    assert [g.prompt.index for g in stream.drain_ready(10**6, idle)] == [2]
    assert seen == [[], [1]]  # at 5.5 and, one response later, at 6.25; then it is 7
    assert clock.now == 7 and stream.idle_work_s == 1.5 and stream.wait_s == 0


def test_batches_are_reproducible_and_differ() -> None:
    def lengths(seed: int) -> list[int]:
        return [len(c.token_ids) for group in random_batch(WORK, seed).completions for c in group]

    assert lengths(1) == lengths(1) != lengths(2)
    assert max(lengths(1)) <= WORK.max_tokens
