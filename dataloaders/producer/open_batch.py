"""One batch's finished groups, routed to the optimizer step that takes them.

Consumes: groups and responses from the producer, decisions of all ranks. Waits for: nothing; a
group whose step is not certain yet is held back. Produces: a ``GroupStream`` for each step, and the
account of the groups that were refused.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.dataloaders.producer.draws import Draws, Notice
from easyrl.dataloaders.producer.group_stream import (
    GroupStream,
    ReadyGroup,
    StoredGroup,
    lengths_of,
)
from easyrl.schema import (
    BatchWithdrawn,
    Completion,
    GroupOutcome,
    Key,
    PeerOutage,
    Prompt,
    RolloutGroup,
    TooManyExcluded,
)


class OpenBatch:
    """A batch in the making. Its methods belong to the producer's loop, ``close`` to any."""

    def __init__(
        self,
        draws: Draws,
        num_generations: int,
        num_in_memory: int,  # groups; what is stored and finds no room is read back when wanted
        *,
        in_prompt_order: bool,
        hands_out_refused: bool,  # excluded groups too go to the streams
    ) -> None:
        self.hands_out_refused = hands_out_refused
        self.membership = draws.membership  # of all ranks; complete when the streams have ended
        self._draws = draws
        self._in_prompt_order = in_prompt_order
        self._room = threading.Semaphore(num_in_memory)
        self.updates = [  # the groups of each optimizer step
            GroupStream(
                self._cancel,
                num_generations=num_generations,
                in_prompt_order=in_prompt_order,
                free_memory=self._room.release,
            )
            for _ in range(draws.membership.num_updates)
        ]
        self.refused: list[GroupOutcome] = []  # this rank's; whole when the streams end
        self.accepted_versions: frozenset[str] = frozenset()  # that its tokens may be stamped with
        # prompts whose stored groups were made otherwise or withdrawn: they are generated again
        self.discarded: frozenset[Key] = frozenset()
        self.withdrawn: str | None = None  # why groups of it were taken back
        self.on_decision: Callable[[], object] = lambda: None  # of any rank; on the loop
        self.producing: concurrent.futures.Future[None] | None = None
        # by position: what waits for its step to be certain, in order of completion
        self._held: dict[int, ReadyGroup] = {}
        self._held_samples: dict[int, tuple[Prompt, dict[int, Completion]]] = {}
        self._num_ended = 0  # streams
        if draws.balance is not None:
            for stream in self.updates:
                stream.on_trained = lambda cost: self._note(-cost)
        draws.on_change = self.release
        draws.on_notice = self._hear
        draws.on_too_many = self.stop

    @property
    def num_waiting(self) -> int:
        """Groups that are finished and not handed out. From any thread."""
        return len(self._held) + sum(stream.waiting for stream in self.updates)

    @property
    def progress(self) -> BatchProgress:
        """From any thread."""
        return BatchProgress.of(self.membership, self.updates)

    def add(self, position: int, group: RolloutGroup, stored: StoredGroup | None = None) -> bool:
        """A finished group, and where it is ``stored``; whether it will be handed out.

        That is once ``release`` finds its step.
        """
        if group.refused and not self.hands_out_refused:
            self.refused.append(GroupOutcome.of(group))
            return False
        in_memory = stored is None or self._room.acquire(blocking=False)
        kept = group if stored is None or in_memory else stored
        lengths = lengths_of(group)
        cost = self.cost_of(lengths)
        self._note(cost)
        self._held[position] = ReadyGroup(
            group.prompt.key, sum(lengths), kept, cost=cost, since_s=group.completed_s
        )
        return True

    def add_stored(self, position: int, prompt: Prompt, stored: StoredGroup) -> bool:
        """A group that was finished before; whether it will be handed out."""
        if stored.refused and not self.hands_out_refused:
            self.refused.append(GroupOutcome.of(stored.load(), recovered=stored.is_recovered))
            return False
        self._note(self.cost_of(stored.lengths))
        self.add_handed_over(position, prompt, stored)
        return True

    def add_handed_over(self, position: int, prompt: Prompt, stored: StoredGroup) -> None:
        """A group that was queued for this rank already, by another one; it will be handed out."""
        self._held[position] = ReadyGroup(
            prompt.key,
            stored.num_tokens,
            stored,
            stored.is_recovered,
            self.cost_of(stored.lengths),
            time.monotonic(),
        )

    def cost_of(self, lengths: Sequence[int]) -> int:
        """Of a group with so many tokens in its prompt and in each response; 0: nobody asks."""
        balance = self._draws.balance
        return 0 if balance is None else balance.cost_of(lengths[0], lengths[1:])

    def add_sample(
        self, position: int, prompt: Prompt, number: int, completion: Completion
    ) -> None:
        """A finished response of a group that is not complete, for the trainer to look ahead."""
        self._held_samples.setdefault(position, (prompt, {}))[1][number] = completion
        self._release_samples()

    def close_open_group(self, position: int, prompt: Prompt) -> None:
        """The group is complete or given up: nobody looks ahead on it any more."""
        self._held_samples.pop(position, None)
        for stream in self.updates:
            stream.open_samples.close_group(prompt)

    def release(self) -> None:
        """Hands on what is certain by now. In prompt order, not before what is open in front."""
        for position in sorted(self._held) if self._in_prompt_order else list(self._held):
            update = self.membership.update_of(position)
            if self._in_prompt_order and (update is None or position > self._draws.first_open):
                break
            if update is not None:
                self.updates[update].put(self._held.pop(position))
        self._release_samples()
        membership = self.membership
        known = len(self.updates) if membership.complete else membership.num_known_updates
        while self._num_ended < known:
            self.updates[self._num_ended].end()
            self._num_ended += 1
        self.on_decision()

    def fail(self, error: BaseException) -> None:
        """The producer has ended with ``error``: whoever waits for a group raises."""
        for stream in self.updates:
            stream.end(error)

    def withdraw(self, reason: str) -> None:
        """The batch has to begin again, on all ranks: who waits raises ``BatchWithdrawn``."""
        if self.withdrawn is None:
            self.withdrawn = reason
            self._interrupt(BatchWithdrawn(reason))
            self._draws.announce("withdrawal", reason)

    def stop(self, problem: str) -> None:
        """Too many prompts are excluded, which all ranks find out: who waits raises."""
        self._interrupt(TooManyExcluded(problem))

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        for stream in self.updates:
            stream.close()

    def _note(self, cost: int) -> None:
        if self._draws.balance is not None:
            self._draws.balance.note(cost)

    def _cancel(self) -> None:
        if self.producing is not None:
            self.producing.cancel()

    def _hear(self, notice: Notice, reason: str) -> None:
        """Another rank has withdrawn the batch, or decides nothing any more."""
        if notice == "withdrawal":
            self.withdraw(reason)
        else:
            self._interrupt(PeerOutage(reason))

    def _interrupt(self, error: Exception) -> None:
        for stream in self.updates:
            stream.interrupt(error)

    def _release_samples(self) -> None:
        for position, (prompt, samples) in list(self._held_samples.items()):
            if (update := self.membership.update_of(position)) is not None:
                del self._held_samples[position]
                for number, completion in samples.items():
                    self.updates[update].open_samples.add(prompt, number, completion)
