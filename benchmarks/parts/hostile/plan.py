"""Which behaviours each run meets, and when: drawn beforehand, from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.parts.hostile.behaviour import (
    Behaviour,
    EndpointBehaviour,
    FileBehaviour,
    SocketBehaviour,
)


@dataclass(frozen=True)
class Due:
    """What happens to a run beside its endpoints, once this many batches are closed."""

    behaviour: SocketBehaviour | FileBehaviour
    batch: int


@dataclass(frozen=True)
class RunPlan:
    """One run.

    Attributes:
        endpoints: a behaviour for each hostile endpoint.
        due: live files and sockets, then files of a killed run, each kind by batch.
        beside_healthy: the healthy endpoints take part, too.
        num_ranks: 1, without a launcher, or more, with it.
    """

    number: int
    seed: int
    endpoints: tuple[EndpointBehaviour, ...]
    due: tuple[Due, ...]
    beside_healthy: bool = True
    num_ranks: int = 1

    @property
    def behaviours(self) -> list[Behaviour]:
        return [*self.endpoints, *(due.behaviour for due in self.due)]

    @property
    def kills(self) -> list[Due]:
        """Each is a SIGKILL in mid-batch, what happens to the files then, and a resume."""
        return [due for due in self.due if due.behaviour.needs_killed_run]

    @property
    def beside(self) -> list[Due]:
        """What happens while the run goes on."""
        return [due for due in self.due if not due.behaviour.needs_killed_run]

    @property
    def may_end_75(self) -> bool:
        return any(behaviour.ends_75 for behaviour in self.behaviours)


def plan_runs(
    behaviours: Sequence[Behaviour], num_runs: int, num_batches: int, seed: int
) -> list[RunPlan]:
    """Each behaviour once, mixed: every run gets its share of each kind, of refusers one at most.

    No two runs' plans depend on each other beyond the shuffle, so that a seed fixes all.
    """
    rng = random.Random(seed)
    shares: list[list[Behaviour]] = [[] for _ in range(num_runs)]
    by_type: dict[object, deque[Behaviour]] = {"refuses": deque()}
    for behaviour in behaviours:
        refuses = isinstance(behaviour, EndpointBehaviour) and behaviour.refuses
        pile = "refuses" if refuses else (type(behaviour), behaviour.kind)
        by_type.setdefault(pile, deque()).append(behaviour)
    at = 0
    for pile in by_type.values():
        shuffled = list(pile)
        rng.shuffle(shuffled)
        for behaviour in shuffled:
            shares[at % num_runs].append(behaviour)
            at += 1
    return [
        _plan(number, share, num_batches, rng.randrange(2**31))
        for number, share in enumerate(shares)
    ]


def plan_ranks(
    strangers: Sequence[SocketBehaviour], number: int, num_ranks: int, num_batches: int, seed: int
) -> RunPlan:
    """A run of several ranks, which listen for each other: all ``strangers`` come, evenly spread.

    Each has some batches until the run ends and its ports are closed.
    """
    come = list(strangers)
    random.Random(seed).shuffle(come)
    due = [Due(each, 2 + at * (num_batches - 10) // len(come)) for at, each in enumerate(come)]
    return RunPlan(number, seed, (), tuple(due), num_ranks=num_ranks)


def _plan(number: int, share: Sequence[Behaviour], num_batches: int, seed: int) -> RunPlan:
    rng = random.Random(seed)
    endpoints = tuple(b for b in share if isinstance(b, EndpointBehaviour))
    beside = [b for b in share if isinstance(b, SocketBehaviour | FileBehaviour)]
    # from the second batch on there is something on disk; the last one closes undisturbed
    due = [Due(behaviour, rng.randrange(2, num_batches - 1)) for behaviour in beside]
    return RunPlan(number, seed, endpoints, tuple(sorted(due, key=lambda due: due.batch)))
