"""One batch's finished groups, routed to the optimizer step that takes them.

Consumes: groups and responses from the producer, decisions of all ranks. Waits for: nothing; a
group whose step is not certain yet is held back. Produces: a ``GroupStream`` for each step, and the
account of the groups that were refused.
"""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.group_memory import GroupMemory, StoredGroup
from easyrl.dataloaders.producer.group_stream import End, GroupStream, ReadyGroup, ReadyQueue
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.schema import Completion, GroupOutcome, Prompt


class _HeldSample(NamedTuple):
    """A finished response whose group's optimizer step is not certain yet."""

    position: int
    prompt: Prompt
    number: int
    completion: Completion


class GroupBatch:
    """The producer's end of a batch. Its methods belong to the producer's loop, ``close`` to any.

    Attributes:
        streams: one for each optimizer step.
        refused: outcomes of this rank's rejected and excluded groups; whole when the streams end.
    """

    def __init__(
        self,
        num_generations: int,
        num_updates: int,
        memory: GroupMemory,
        *,
        in_prompt_order: bool,
        hands_out_refused: bool,
    ) -> None:
        self.hands_out_refused = hands_out_refused
        self._in_prompt_order = in_prompt_order
        self._queues = [ReadyQueue() for _ in range(num_updates)]
        self._samples = [
            OpenSamples(num_generations, wake=lambda q=queue: q.put(None))  # type: ignore[misc]
            for queue in self._queues
        ]
        self.streams = [
            GroupStream(
                queue, memory, self.close, open_samples=samples, in_prompt_order=in_prompt_order
            )
            for queue, samples in zip(self._queues, self._samples, strict=True)
        ]
        self.refused: list[GroupOutcome] = []
        self.producing: concurrent.futures.Future[None] | None = None
        self._recovered: set[int] = set()  # positions
        self._held: dict[int, ReadyGroup] = {}  # by position, in order of completion
        self._held_samples: list[_HeldSample] = []
        self._num_ended = 0  # streams
        self._membership: BatchMembership | None = None

    @property
    def membership(self) -> BatchMembership:
        """Of all ranks; complete when the streams have ended."""
        assert self._membership is not None
        return self._membership

    @property
    def num_waiting(self) -> int:
        """Groups that are finished and not handed out. From any thread."""
        return len(self._held) + sum(stream.waiting for stream in self.streams)

    def add(self, position: int, group: ReadyGroup) -> None:
        """A group that will be handed out once ``release`` finds its step."""
        self._held[position] = group

    def add_stored(self, position: int, prompt: Prompt, stored: StoredGroup) -> None:
        """A group that an earlier attempt has finished."""
        if stored.refused and not self.hands_out_refused:
            self.refused.append(GroupOutcome.of(stored.load(), recovered=stored.is_recovered))
            return
        if stored.is_recovered:
            self._recovered.add(position)
        self.add(position, ReadyGroup(prompt.key, stored.num_tokens, stored))

    def add_sample(
        self, position: int, prompt: Prompt, number: int, completion: Completion, draws: Draws
    ) -> None:
        """A finished response of a group that is not complete, for the trainer to look ahead."""
        self._held_samples.append(_HeldSample(position, prompt, number, completion))
        self._release_samples(draws.membership)

    def close_open_group(self, prompt: Prompt) -> None:
        """The group is complete or given up: nobody looks ahead on it any more."""
        self._held_samples = [held for held in self._held_samples if held.prompt is not prompt]
        for samples in self._samples:
            samples.close_group(prompt)

    def release(self, draws: Draws) -> None:
        """Hands on what is certain by now. In prompt order, not before what is open in front."""
        membership = self._membership = draws.membership
        for position in sorted(self._held) if self._in_prompt_order else list(self._held):
            update = membership.update_of(position)
            if self._in_prompt_order and (update is None or position > draws.first_open):
                break
            if update is None:
                continue
            group = self._held.pop(position)
            if position in self._recovered:
                self.streams[update].recovered.add(group.key)
            self._queues[update].put_group(group)
        self._release_samples(membership)
        known = len(self._queues) if membership.complete else membership.num_known_updates
        while self._num_ended < known:
            self._queues[self._num_ended].put(End())
            self._num_ended += 1

    def fail(self, error: BaseException) -> None:
        """The producer has ended with ``error``: whoever waits for a group raises."""
        for queue in self._queues:
            queue.put(error)

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        if self.producing is not None:
            self.producing.cancel()

    def _release_samples(self, membership: BatchMembership) -> None:
        held, self._held_samples = self._held_samples, []
        for sample in held:
            update = membership.update_of(sample.position)
            if update is None:
                self._held_samples.append(sample)
            else:
                self._samples[update].add(sample.prompt, sample.number, sample.completion)
