"""Queue of finished groups between producer and trainer, the trainer's end."""

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

    key: Key
    num_tokens: int  # packed
    group: RolloutGroup | StoredGroup


class End:
    """Nothing comes behind it: all groups are on the queue."""


class ReadyQueue(queue.SimpleQueue[ReadyGroup | End | BaseException | None]):
    """What goes from producer to consumer: groups, their end, or why there are no more.

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
    """The groups of one optimizer step; iterating blocks until the next one is there.

    Consumes: groups from the queue. Waits for: the next group, as the producer puts them: in order
    of completion, or in that of the prompts. Is unblocked by: the producer thread, ``interrupt``,
    and a finished response of ``open_samples`` where there is other work to do with it.
    Produces: every group exactly once, then stops.
    Raises ``ProducerError`` if the producer failed, and what a store raises for a damaged group.

    Args:
        memory: is told what has left the queue and what has left memory.
        cancel: gives up the groups that are not finished.
        open_samples: the responses of groups that are not complete; wakes the consumer with None.
        in_prompt_order: the queue has them in that order; ``drain_ready`` waits for each next one.

    Attributes:
        recovered: keys of the groups that come from the store, finished in an earlier attempt; the
            producer adds to it before such a group is on the queue.
    """

    def __init__(
        self,
        ready: ReadyQueue,
        memory: GroupMemory,
        cancel: Callable[[], object],
        *,
        open_samples: OpenSamples | None = None,
        in_prompt_order: bool = False,
    ) -> None:
        self._has_more = True  # behind what is off the queue
        self._ready = ready
        self._memory = memory
        self._cancel = cancel
        self._in_prompt_order = in_prompt_order
        # off the queue and not handed out, in order of arrival
        self._here: OrderedDict[Key, ReadyGroup] = OrderedDict()
        self._num_handed_out = 0
        self._closed = False
        self._failure: ProducerError | None = None
        self._interruption: BaseException | None = None
        self.open_samples = open_samples or OpenSamples()
        self.recovered: set[Key] = set()
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
        while (key := self._next(block=True)) is not None:
            yield self._hand_out(key)

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
        while (key := self._next(not groups or self._in_prompt_order, idle)) is not None:
            tokens += self._here[key].num_tokens
            if groups and tokens > max_tokens:
                break
            groups.append(self._hand_out(key))
        return groups

    def drain(self, keys: Sequence[Key]) -> list[RolloutGroup]:
        """Waits for the groups of these prompts and hands them out, in this order.

        They have not been handed out yet. Empty when the stream is closed.
        """
        if self._closed:
            return []
        self._raise_if_ended()
        for key in keys:
            while key not in self._here:
                assert self._has_more, f"group {key} was handed out before"
                self._receive(block=True)
        return [self._hand_out(key) for key in keys]

    def complete(self) -> None:
        """Waits for the whole batch (``mode: sync``); from then on nothing blocks."""
        self._raise_if_ended()
        while self._has_more:
            self._receive(block=True)
        self.first_group_wait_s = self.wait_s

    def close(self) -> None:
        """Gives up the rest of the batch: its requests are cancelled."""
        self._closed = True
        self._has_more = False
        self._here.clear()
        self._cancel()

    def interrupt(self, error: BaseException) -> None:
        """Has the consumer raise ``error`` where it waits, or else as soon as it asks for a group.

        From any thread, and from a signal handler: it takes no lock that the consumer may hold.
        """
        self._interruption = error
        self._ready.put(None)

    def _next(self, block: bool, idle: Idle | None = None) -> Key | None:
        """Key of the next group, once it is here. Waits for it if it may ``block``."""
        if self._closed:
            return None
        self._raise_if_ended()
        while not self._here:
            if not self._has_more:
                return None
            if block and idle is not None and self._does_other_work(idle):
                continue
            if not self._receive(block):
                return None
        return next(iter(self._here))

    def _does_other_work(self, idle: Idle) -> bool:
        """False if there is nothing to do but wait. Otherwise the queue may have been read."""
        if self._receive(block=False):
            return True
        self.open_samples.listen()  # before the look: what returns behind it must be noticed
        return idle()

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
        elif isinstance(item, ReadyGroup):
            self._memory.received()
            self._here[item.key] = item
        elif isinstance(item, End):
            self._has_more = False
        self._raise_if_ended()
        return True

    def _raise_if_ended(self) -> None:
        if self._interruption is not None:
            raise self._interruption
        if self._failure is not None:
            raise self._failure

    def _hand_out(self, key: Key) -> RolloutGroup:
        group = self._here.pop(key).group
        self._num_handed_out += 1
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
