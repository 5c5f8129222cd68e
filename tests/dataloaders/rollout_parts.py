"""A generate, a scorer and a store that the test controls."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_stream import GroupStream, lengths_of, packed_tokens
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.runtime.loop_thread import LoopThread
from easyrl.schema import Completion, Exclusion, Key, Prompt, RolloutGroup, Score, VersionSpan

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


def at_once(generate):
    """A ``begin_group`` in which every group has its turn as soon as it asks."""

    @asynccontextmanager
    async def begin_group(prompt: Prompt, version: str | None, priority: int):
        yield lambda sample: generate(prompt, sample, version)

    return begin_group


def generator(thread, generate, scorer=None, **options) -> RolloutGenerator:
    return RolloutGenerator(
        thread, at_once(generate), scorer or SumScorer(), num_generations=G, **options
    )


def produce(rollouts: RolloutGenerator, prompts, version, *, store) -> GroupStream:
    """As ``RolloutGenerator.produce``, of what ``store`` does not have."""
    membership, recovered = BatchMembership(len(prompts) or 1, num_left=len(prompts)), []
    for position, prompt in enumerate(prompts):
        if store is not None and (stored := store.find(prompt)) is not None:
            membership.decide(position, True)
            recovered.append((position, stored))
    batch = rollouts.produce_batch(
        Draws(membership),
        prompts.__getitem__,
        version,
        store=store,
        recovered=recovered,
        hands_out_refused=True,
    )
    return batch.updates[0]


@dataclass
class MemoryStore:
    """A store in memory that counts, and can be held up like a slow disk."""

    groups: dict[Key, RolloutGroup] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)  # prompts whose groups were read back
    flushes: int = 0
    free: Event = field(default_factory=Event)  # while it is not set, ``add`` takes its time

    def __post_init__(self):
        self.free.set()

    def find(self, prompt: Prompt) -> "Stored | None":
        return Stored(self, self.groups[prompt.key]) if prompt.key in self.groups else None

    def add(self, group: RolloutGroup) -> tuple[RolloutGroup, "Stored"]:
        assert self.free.wait(timeout=10)
        group = replace(group, digest=f"digest {group.prompt.index}")
        self.groups[group.prompt.key] = group
        return group, Stored(self, group)

    def flush(self) -> None:
        self.flushes += 1


@dataclass(frozen=True)
class Stored:
    store: MemoryStore
    group: RolloutGroup

    @property
    def lengths(self) -> tuple[int, ...]:
        return lengths_of(self.group)

    @property
    def num_tokens(self) -> int:
        return packed_tokens(self.group)

    @property
    def refused(self) -> bool:
        return self.group.refused is not None

    @property
    def exclusion(self) -> Exclusion | None:
        return self.group.excluded

    is_recovered = True

    def load(self) -> RolloutGroup:
        self.store.loads.append(self.group.prompt.index)
        return self.group
