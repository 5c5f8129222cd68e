"""Discrete-event simulation of a batch whose rejected groups are replaced.

No overhead of any kind: what a run reaches of its figures is what it loses to its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import simpy


class Timing(Protocol):
    """What the simulation needs of a batch (``Load``)."""

    @property
    def num_groups(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def seconds(self, position: int, sample: int) -> float: ...
    def accepts(self, position: int) -> bool: ...
    def rank_of(self, position: int) -> int: ...


@dataclass
class SimulatedBatch:
    """When the groups of a batch were ready.

    Attributes:
        ready: moment and position of each accepted group, in order of completion, seconds.
        generation_s: until the last group, accepted or not.
    """

    num_ranks: int
    rank_of: Callable[[int], int]
    ready: list[tuple[float, int]] = field(default_factory=list)
    generation_s: float = 0.0

    @property
    def trained(self) -> list[int]:
        return [position for _, position in self.ready]

    def batch_s(self, train_s: float) -> float:
        """Until the slowest rank has trained its groups, each ``train_s`` long, as they came."""
        end = [0.0] * self.num_ranks
        for moment, position in self.ready:
            rank = self.rank_of(position)
            end[rank] = max(end[rank], moment) + train_s
        return max(self.generation_s, *end)


def simulate(timing: Timing, *, overlapped: bool) -> SimulatedBatch:
    """Generates the batch; waiting requests are served in the order of their prompts.

    Args:
        overlapped: a rejected group is replaced at once; else once all that were drawn with it are
            finished.
    """
    batch = SimulatedBatch(timing.num_ranks, timing.rank_of)
    env = simpy.Environment()
    slots = simpy.PriorityResource(env, timing.num_slots)
    order = iter(range(10**9))

    def request(position: int, sample: int) -> Generator[Any, Any, None]:
        with slots.request(priority=position) as turn:
            yield turn
            yield env.timeout(timing.seconds(position, sample))

    def group(position: int) -> Generator[Any, Any, None]:
        samples = range(timing.num_samples)
        yield env.all_of([env.process(request(position, sample)) for sample in samples])
        if timing.accepts(position):
            batch.ready.append((env.now, position))
        elif overlapped:
            yield env.process(group(next(order)))

    def generation() -> Generator[Any, Any, None]:
        while missing := timing.num_groups - len(batch.ready):
            yield env.all_of([env.process(group(next(order))) for _ in range(missing)])

    env.run(env.process(generation()))
    batch.generation_s = env.now
    return batch
