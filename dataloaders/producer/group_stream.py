"""Queue of finished groups between producer and trainer, for one optimizer step."""

from __future__ import annotations

import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.schema import Exclusion, FinishedSamples, GatewayGone, Key, RewardError, RolloutGroup

# Responses that went through the frozen models in one piece: prompts and numbers of their samples.
Piece = list[tuple[Key, list[int]]]
# The first row waits for more: until there is enough for one and no other group follows at once, at
# most half as long again as the first group was waited for (docs/benchmarks.md, "Cores follow the
# work").
ENOUGH = 1 / 16  # of what is packed together, eight rows (``ROWS_PER_DRAIN``): half a row
AT_ONCE_S = 0.015
WAIT_FOR_MORE = 1 / 2


class ProducerError(RuntimeError):
    """The producer thread failed; the cause carries its traceback."""


class StoredGroup(Protocol):
    """A finished group that is somewhere else than in memory."""

    @property
    def lengths(self) -> tuple[int, ...]: ...  # tokens of the prompt, and of each response
    @property
    def num_tokens(self) -> int: ...  # packed
    @property
    def refused(self) -> bool: ...  # rejected or excluded: it is not trained
    @property
    def exclusion(self) -> Exclusion | None: ...  # why nobody can answer its prompt
    @property
    def is_recovered(self) -> bool: ...  # finished in an earlier attempt of the run
    def load(self) -> RolloutGroup:
        """Reads it back. Raises what the store raises where it is damaged."""


class PastDrain(Protocol):
    """What an earlier attempt drained at once (``ledger.journal.codec.DrainRecord``)."""

    keys: list[Key]
    max_tokens: int
    ahead: list[Piece]  # what it had computed ahead since the drain before


class ReadyGroup(NamedTuple):
    """A finished group on its way to the consumer."""

    key: Key
    num_tokens: int  # packed
    group: RolloutGroup | StoredGroup
    is_recovered: bool = False  # finished in an earlier attempt
    cost: int = 0  # of training on it (``balance.GroupCost``)
    since_s: float = 0.0  # of time.monotonic, when it was scored; or when this attempt had it


Idle = Callable[[], bool]  # does one piece of other work; False if there was none


class GroupStream:
    """The groups of one optimizer step; iterating blocks until the next one is there.

    Consumes: groups, as the producer puts them: in order of completion, or in that of the prompts.
    Waits for: the next group. Is unblocked by: the producer thread, ``interrupt``, and a finished
    response of ``open_samples`` where there is other work to do with it. Produces: every group
    exactly once, then stops.
    Raises ``ProducerError`` if the producer failed, ``RewardError`` if a reward did,
    ``GatewayGone`` if no episode can be played, and what a store raises for a damaged group.
    """

    def __init__(
        self,
        cancel: Callable[[], object],  # gives up the groups that are not finished
        *,
        num_generations: int = 0,  # G, responses per prompt
        in_prompt_order: bool = False,  # groups are put so; ``drain_ready`` waits for each next one
        free_memory: Callable[[], object] = lambda: None,  # a group in memory no longer waits
    ) -> None:
        self._cancel = cancel
        self._in_prompt_order = in_prompt_order
        self._free_memory = free_memory
        # None only wakes the consumer; True: all groups are on the queue
        self._ready = queue.SimpleQueue[ReadyGroup | Literal[True] | BaseException | None]()
        self._has_more = True  # behind what is off the queue
        # off the queue and not handed out, in order of arrival
        self._here: OrderedDict[Key, ReadyGroup] = OrderedDict()
        self._num_put = 0  # by one thread at a time, the producer's
        self._num_handed_out = 0
        self._closed = False
        self._failure: ProducerError | RewardError | GatewayGone | None = None
        self._interruption: BaseException | None = None
        self._ahead: list[Piece] = []  # since the last drain
        self._untrained = [0, 0]  # cost and packed tokens of what was handed out
        self._num_tokens_out = 0  # packed, of all that was
        # finished responses of groups that are not complete
        self.open_samples = OpenSamples(num_generations, wake=lambda: self._ready.put(None))
        self.recovered: set[Key] = set()  # put, and finished in an earlier attempt
        self.accepted_versions: frozenset[str] = frozenset()  # that its tokens may be stamped with
        # what an earlier attempt drained at once: it is handed out first, and so again
        self.past_drains: deque[PastDrain] = deque()
        # is told of each group in memory as it comes off the queue, on the consumer's thread
        self.on_arrival: Callable[[RolloutGroup], object] = lambda group: None
        # is told of each drain, and of what was computed ahead since the one before; what it
        # raises, ``drain_ready`` does
        self.on_drain: Callable[[Sequence[Key], int, Sequence[Piece]], object] = lambda *drain: None
        # is told the cost of what was trained, row by row where ``note_trained`` is called, and of
        # what is left of a drain when the next one begins
        self.on_trained: Callable[[int], object] = lambda cost: None
        # is told of each group when it is handed out: since when it was ready, and now, seconds of
        # time.monotonic
        self.on_handed_out: Callable[[Key, float, float], object] = lambda *told: None
        self.trained_at_end = False  # all groups are drained before the first of them is trained
        # groups that are not put, and of which responses may have been computed ahead: this rank
        # has drawn them, and another one trains them or nobody does
        self.elsewhere: Mapping[Key, RolloutGroup | StoredGroup] = {}
        self.wait_s = 0.0  # time the consumer was blocked
        self.load_s = 0.0  # time the consumer read groups back from the store
        self.first_group_wait_s: float | None = None

    # ---- the producer's side ---------------------------------------------------------------------

    def put(self, group: ReadyGroup) -> None:
        self._num_put += 1
        if group.is_recovered:
            self.recovered.add(group.key)
        self._ready.put(group)

    def end(self, error: BaseException | None = None) -> None:
        """All groups were put; or the producer has ended with ``error``, and who waits raises."""
        self._ready.put(True if error is None else error)

    # ---- the consumer's side ---------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Groups that are finished and not handed out. From any thread."""
        return 0 if self._closed else self._num_put - self._num_handed_out

    @property
    def num_trained(self) -> int:
        """Groups that were handed out and trained, by their share of the tokens. From any thread.

        Those of a drain that need no training are counted with its end.
        """
        num_groups, num_tokens, untrained = (
            self._num_handed_out,
            self._num_tokens_out,
            self._untrained[1],
        )
        return num_groups * max(num_tokens - untrained, 0) // max(num_tokens, 1)

    def __iter__(self) -> Iterator[RolloutGroup]:
        while (key := self._next(block=True)) is not None:
            yield self._hand_out(key)

    def drain_ready(self, max_tokens: int, idle: Idle | None = None) -> list[RolloutGroup]:
        """Waits for one group, then adds those ready now, within ``max_tokens`` packed tokens.

        Before the first are handed out it waits a little for more, where they are few: responses of
        like lengths finish together, and a small row costs nearly what a large one does.
        While it would wait it calls ``idle``, which does one piece of other work and returns True,
        or returns False where there is none; then it waits for what comes next, a group or another
        response of ``open_samples``, and asks again. A group that is ready is seen between two
        pieces; the time they take does not count as waiting.
        In prompt order it waits for each next group instead, until one does not fit, so that what
        comes together is a matter of order and size alone. Empty when the batch is complete. The
        first group is returned whatever its size.
        What an earlier attempt drained at once is so again, whatever ``max_tokens``.
        """
        if not self.trained_at_end:
            self.note_trained(self._untrained[1])
        groups: list[RolloutGroup] = []
        if self.past_drains:
            groups = self.drain(self.past_drains.popleft().keys)
        else:
            tokens = 0
            while (key := self._next(not groups or self._in_prompt_order, idle)) is not None:
                if self._num_handed_out == 0 and not self._in_prompt_order:
                    self._wait_for_more(ENOUGH * max_tokens, idle)
                tokens += self._here[key].num_tokens
                if groups and tokens > max_tokens:
                    break
                groups.append(self._hand_out(key))
        if groups:
            self.on_drain([group.prompt.key for group in groups], max_tokens, self._ahead)
            self._ahead = []
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

    def note_trained(self, num_tokens: int) -> None:
        """Rows of so many packed tokens of what was drained were trained."""
        cost, tokens = self._untrained
        done = min(num_tokens, tokens)
        trained = cost if done == tokens else cost * done // tokens
        self._untrained = [cost - trained, tokens - done]
        if trained:
            self.on_trained(trained)

    def note_ahead(self, piece: Sequence[FinishedSamples]) -> None:
        """These responses were computed ahead, in one piece and in this order."""
        self._ahead.append([(each.prompt.key, list(each.completions)) for each in piece])

    def ahead_of_drain(self, max_tokens: int) -> Iterator[list[FinishedSamples]]:
        """What an earlier attempt computed ahead before it drained what ``drain_ready`` gives next.

        Pieces in order; without those of which a response is not known, which there are only in a
        batch that no attempt has closed. Raises what a store raises for a damaged group.
        """
        if self._closed or not self.past_drains:
            return
        while self._has_more and self._receive(block=False):
            pass  # what was recovered is on the queue from the start
        for piece in self.past_drains[0].ahead:
            samples = [self._samples(key, numbers) for key, numbers in piece]
            whole = [each for each in samples if each is not None]
            if len(whole) == len(samples):
                yield whole

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

    def _wait_for_more(self, num_tokens: float, idle: Idle | None) -> None:
        """Until groups of ``num_tokens`` are here and none follows at once, or all are here, or it
        has been long enough."""
        self.first_group_wait_s = self.wait_s
        end_s = time.monotonic() + WAIT_FOR_MORE * self.wait_s
        while self._has_more and (left_s := end_s - time.monotonic()) > 0:
            if sum(ready.num_tokens for ready in self._here.values()) >= num_tokens:
                if not self._receive(block=True, limit_s=min(left_s, AT_ONCE_S)):
                    break
            elif idle is None or not self._does_other_work(idle):
                self._receive(block=True, limit_s=left_s)

    def _does_other_work(self, idle: Idle) -> bool:
        """False if there is nothing to do but wait. Otherwise the queue may have been read."""
        if self._receive(block=False):
            return True
        self.open_samples.listen()  # before the look: what returns behind it must be noticed
        return idle()

    def _receive(self, block: bool, limit_s: float | None = None) -> bool:
        """Takes what comes next off the queue. False if there is nothing and it may not wait, or
        not longer than ``limit_s``."""
        start = time.monotonic()
        try:
            item = self._take(block, limit_s)
        except queue.Empty:
            return False
        finally:
            self.wait_s += time.monotonic() - start
        if isinstance(item, RewardError | GatewayGone):  # they say all, it is nothing of ours
            self._failure = item
        elif isinstance(item, BaseException):
            self._failure = ProducerError(f"rollout production failed: {item}")
            self._failure.__cause__ = item
        elif isinstance(item, ReadyGroup):
            self._here[item.key] = item
            if isinstance(item.group, RolloutGroup):
                self.on_arrival(item.group)
        elif item is True:
            self._has_more = False
        self._raise_if_ended()
        return True

    def _take(
        self, block: bool, limit_s: float | None
    ) -> ReadyGroup | Literal[True] | BaseException | None:
        """Raises ``queue.Empty``.

        CPython's ``SimpleQueue.get`` with a limit waits for ever where it finds the queue empty and
        its lock free, and the limit passes before it looks at the clock again. A look that finds
        nothing takes the lock, and there is one consumer.
        """
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            if not block:
                raise
        return self._ready.get(True, limit_s)

    def _raise_if_ended(self) -> None:
        if self._interruption is not None:
            raise self._interruption
        if self._failure is not None:
            raise self._failure

    def _hand_out(self, key: Key) -> RolloutGroup:
        ready = self._here.pop(key)
        group = ready.group
        self.on_handed_out(key, ready.since_s, time.monotonic())
        self._untrained = [
            old + new
            for old, new in zip(self._untrained, (ready.cost, ready.num_tokens), strict=True)
        ]
        self._num_tokens_out += ready.num_tokens
        self._num_handed_out += 1
        if self.first_group_wait_s is None:
            self.first_group_wait_s = self.wait_s
        if isinstance(group, RolloutGroup):
            self._free_memory()
            return group
        start = time.monotonic()
        try:
            return group.load()
        finally:
            self.load_s += time.monotonic() - start

    def _samples(self, key: Key, numbers: Sequence[int]) -> FinishedSamples | None:
        found = self._here[key].group if key in self._here else self.elsewhere.get(key)
        if found is None:
            return None
        group = found if isinstance(found, RolloutGroup) else found.load()
        if not all(n < len(group.completions) for n in numbers):
            return None
        return FinishedSamples(group.prompt, {n: group.completions[n] for n in numbers})


def lengths_of(group: RolloutGroup) -> tuple[int, ...]:
    """Tokens of the prompt, and of each response."""
    return (len(group.prompt.token_ids), *(len(c.token_ids) for c in group.completions))


def packed_tokens(group: RolloutGroup) -> int:
    """Tokens of a group packed with its prompt once: P + ΣR (paper §4.2). A tree has no more."""
    return sum(lengths_of(group))
