"""The consumer's end of a batch: its groups as they arrive, or in the order of their prompts."""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from easyrl.dataloaders.producer.group_memory import GroupMemory, StoredGroup
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.schema import Key, RolloutGroup


class ProducerError(RuntimeError):
    """The producer thread failed; the cause carries its traceback."""


class ReadyGroup(NamedTuple):
    """A finished group on its way to the consumer."""

    position: int  # of its prompt in the batch
    num_tokens: int  # packed
    group: RolloutGroup | StoredGroup


class ReadyQueue(queue.SimpleQueue[ReadyGroup | BaseException | None]):
    """What goes from producer to consumer: groups, or why there are no more.

    None only wakes the consumer.

    Attributes:
        num_groups: that were put. All of them by one thread at a time, the producer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 0

    def put_group(self, group: ReadyGroup) -> None:
        self.num_groups += 1
        self.put(group)


Idle = Callable[[], bool]  # does one piece of other work; False if there was none


class GroupStream:
    """The groups of one batch; iterating blocks until the next one is there.

    Consumes: groups from the queue. Waits for: the next group, in order of completion, or in that
    of the prompts if ``in_prompt_order``. Is unblocked by: the producer thread, ``interrupt``, and
    a finished response of ``open_samples`` where there is other work to do with it.
    Produces: every group of the batch exactly once, then stops.
    Raises ``ProducerError`` if the producer failed, and what a store raises for a damaged group.

    Args:
        num_groups: of the batch, those that are on the queue already included.
        memory: is told what has left the queue and what has left memory.
        cancel: gives up the groups that are not finished.
        open_samples: the responses of groups that are not complete; wakes the consumer with None.
        recovered: keys of the groups that come from the store, finished in an earlier attempt.
    """

    def __init__(
        self,
        num_groups: int,
        ready: ReadyQueue,
        memory: GroupMemory,
        cancel: Callable[[], object],
        *,
        open_samples: OpenSamples | None = None,
        recovered: frozenset[Key] = frozenset(),
        in_prompt_order: bool = False,
    ) -> None:
        self._num_missing = num_groups  # not off the queue yet
        self._ready = ready
        self._memory = memory
        self._cancel = cancel
        self._in_prompt_order = in_prompt_order
        # off the queue and not handed out: positions in order of arrival
        self._here: OrderedDict[int, ReadyGroup] = OrderedDict()
        self._first_missing = 0  # position; all before it are handed out
        self._ahead: set[int] = set()  # positions behind it that are handed out
        self._num_handed_out = 0
        self._closed = False
        self._failure: ProducerError | None = None
        self._interruption: BaseException | None = None
        self.open_samples = open_samples or OpenSamples()
        self.recovered = recovered
        self.wait_s = 0.0  # time the consumer was blocked
        self.load_s = 0.0  # time the consumer read groups back from the store
        self.first_group_wait_s: float | None = None

    @property
    def num_recovered(self) -> int:
        """Groups that come from the store."""
        return len(self.recovered)

    @property
    def waiting(self) -> int:
        """Groups that are finished and not handed out. From any thread."""
        return 0 if self._closed else self._ready.num_groups - self._num_handed_out

    def __iter__(self) -> Iterator[RolloutGroup]:
        while (position := self._next(block=True)) is not None:
            yield self._hand_out(position)

    def drain_ready(self, max_tokens: int, idle: Idle | None = None) -> list[RolloutGroup]:
        """Waits for one group, then adds those ready now, within ``max_tokens`` packed tokens.

        While it would wait for that one it calls ``idle``, which does one piece of other work and
        returns True, or returns False where there is none; then it waits for what comes next, a
        group or another response of ``open_samples``, and asks again. A group that is ready is
        seen between two pieces; the time they take does not count as waiting.
        In prompt order it waits for each next group instead, until one does not fit, so that what
        comes together is a matter of order and size alone. Empty when the batch is complete. The
        first group is returned whatever its size.
        """
        groups: list[RolloutGroup] = []
        tokens = 0
        while (position := self._next(not groups or self._in_prompt_order, idle)) is not None:
            tokens += self._here[position].num_tokens
            if groups and tokens > max_tokens:
                break
            groups.append(self._hand_out(position))
        return groups

    def take(self, positions: Sequence[int]) -> list[RolloutGroup]:
        """Waits for the groups of these prompts and hands them out, in this order.

        ``positions`` are in the batch, of groups that are not handed out yet. Empty when the stream
        is closed.
        """
        if self._closed:
            return []
        self._raise_if_ended()
        for position in positions:
            while position not in self._here:
                assert self._num_missing, f"group {position} was handed out before"
                self._receive(block=True)
        return [self._hand_out(position) for position in positions]

    def complete(self) -> None:
        """Waits for the whole batch (``mode: sync``); from then on nothing blocks."""
        self._raise_if_ended()
        while self._num_missing:
            self._receive(block=True)
        self.first_group_wait_s = self.wait_s

    def close(self) -> None:
        """Gives up the rest of the batch: its requests are cancelled."""
        self._closed = True
        self._num_missing = 0
        self._here.clear()
        self._cancel()

    def interrupt(self, error: BaseException) -> None:
        """Has the consumer raise ``error`` where it waits, or else as soon as it asks for a group.

        From any thread, and from a signal handler: it takes no lock that the consumer may hold.
        """
        self._interruption = error
        self._ready.put(None)

    def _next(self, block: bool, idle: Idle | None = None) -> int | None:
        """Position of the next group, once it is here. Waits for it if it may ``block``."""
        if self._closed:
            return None
        self._raise_if_ended()
        while (position := self._next_here()) is None:
            if not self._num_missing:
                return None
            if block and idle is not None and self._does_other_work(idle):
                continue
            if not self._receive(block):
                return None
        return position

    def _does_other_work(self, idle: Idle) -> bool:
        """False if there is nothing to do but wait. Otherwise the queue may have been read."""
        if self._receive(block=False):
            return True
        self.open_samples.listen()  # before the look: what returns behind it must be noticed
        return idle()

    def _next_here(self) -> int | None:
        if self._in_prompt_order:
            return self._first_missing if self._first_missing in self._here else None
        return next(iter(self._here), None)

    def _receive(self, block: bool) -> bool:
        """Takes what comes next off the queue. False if there is nothing and it may not wait."""
        start = time.monotonic()
        try:
            item = self._ready.get(block)
        except queue.Empty:
            return False
        finally:
            self.wait_s += time.monotonic() - start
        if isinstance(item, BaseException):
            self._failure = ProducerError(f"rollout production failed: {item}")
            self._failure.__cause__ = item
        elif item is not None:
            self._memory.received()
            self._here[item.position] = item
            self._num_missing -= 1
        self._raise_if_ended()
        return True

    def _raise_if_ended(self) -> None:
        if self._interruption is not None:
            raise self._interruption
        if self._failure is not None:
            raise self._failure

    def _hand_out(self, position: int) -> RolloutGroup:
        group = self._here.pop(position).group
        self._num_handed_out += 1
        self._ahead.add(position)
        while self._first_missing in self._ahead:
            self._ahead.remove(self._first_missing)
            self._first_missing += 1
        if self.first_group_wait_s is None:
            self.first_group_wait_s = self.wait_s
        if isinstance(group, RolloutGroup):
            self._memory.handed_out()
            return group
        start = time.monotonic()
        try:
            return group.load()
        finally:
            self.load_s += time.monotonic() - start


def packed_tokens(group: RolloutGroup) -> int:
    """Tokens of a group packed with its prompt once: P + ΣR (paper §4.2). A tree has no more."""
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)
