"""The producer with the journal behind it: what the trainer is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from easyrl.dataloaders.producer.group_stream import GroupStream, Idle
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.ledger.journal.batch import BatchJournal, Journal
from easyrl.ledger.journal.codec import DrainRecord, Piece
from easyrl.schema import FinishedSamples, Key, Prompt, RolloutGroup, ServedWeights


class JournalledRollouts:
    """Generates only what no earlier attempt has finished with the same weights, and journals it.

    Args:
        repeats_drains: what an earlier attempt took together is so again. Not needed where the
            generator hands groups out in prompt order: that gives the same drains.
    """

    def __init__(
        self, generator: RolloutGenerator, journal: Journal, *, repeats_drains: bool = True
    ) -> None:
        self._generator = generator
        self._journal = journal
        self._repeats_drains = repeats_drains
        self._batch: BatchJournal | None = None
        self._streams: list[GroupStream] = []  # of the open batch

    @property
    def num_waiting(self) -> int:
        """Groups of the open batch that are finished and not handed out. From any thread."""
        return sum(stream.waiting for stream in self._streams)

    def produce(
        self, prompts: Sequence[Prompt], served: ServedWeights, priority: int = 0
    ) -> JournalledStream:
        """Starts the generation of ``prompts``; the calls of one batch share its journal.

        Raises ``JournalError`` where what earlier attempts left is not as it was written.
        """
        if self._batch is None or self._batch.served != served:
            self.close()
            self._batch = self._journal.open_batch(served)
        batch = self._batch
        stream = self._generator.produce(
            prompts, str(served.version), store=batch, priority=priority
        )
        self._streams = [*self._streams, stream]
        by_key = {prompt.key: prompt for prompt in prompts}

        def recover(key: Key) -> RolloutGroup | None:
            stored = batch.find(by_key[key]) if key in by_key else None
            return None if stored is None else stored.load()

        return JournalledStream(
            stream,
            batch.accepted_versions,
            batch.discarded & by_key.keys(),
            positions={key: position for position, key in enumerate(by_key)},
            drains=batch.drained_before(prompts) if self._repeats_drains else (),
            recover=recover,
            add_drain=batch.add_drain,
        )

    def sync(self) -> None:
        """The open batch's groups outlive the machine going down, unless the policy is never.

        Raises ``JournalError``.
        """
        if self._batch is not None:
            self._batch.sync()

    def close(self) -> None:
        """The open batch is over. Safe to call twice."""
        if self._batch is not None:
            self._batch.close()
            self._batch = None
            self._streams = []


class JournalledStream:
    """A ``GroupStream``, and what the journal knew of its prompts.

    Args:
        positions: of prompts in the stream; needed for ``drains``.
        drains: what an earlier attempt took together: it is handed out first, and so again.
        recover: an earlier attempt's group, if it is known.
        add_drain: is told the keys and ``max_tokens`` of each ``drain_ready``, and what was
        computed
            ahead since the one before.

    Attributes:
        accepted_versions: those its tokens may be stamped with.
        discarded: prompts whose journalled groups are of other weights or settings and are
            generated again.
    """

    def __init__(
        self,
        stream: GroupStream,
        accepted_versions: frozenset[str],
        discarded: frozenset[Key],
        *,
        positions: Mapping[Key, int] | None = None,
        drains: Sequence[DrainRecord] = (),
        recover: Callable[[Key], RolloutGroup | None] = lambda key: None,
        add_drain: Callable[[Sequence[Key], int, Sequence[Piece]], object] = lambda *taken: None,
    ) -> None:
        self._stream = stream
        self._positions = positions or {}
        self._drains = deque(drains)
        self._recover = recover
        self._add_drain = add_drain
        self._ahead: list[Piece] = []  # since the last take
        self.accepted_versions = accepted_versions
        self.discarded = discarded

    @property
    def recovered(self) -> frozenset[Key]:
        """Prompts whose groups an earlier attempt has finished."""
        return self._stream.recovered

    @property
    def num_recovered(self) -> int:
        return self._stream.num_recovered

    @property
    def open_samples(self) -> OpenSamples:
        """Finished responses of groups that are not complete."""
        return self._stream.open_samples

    @property
    def waiting(self) -> int:
        return self._stream.waiting

    @property
    def wait_s(self) -> float:
        return self._stream.wait_s

    @property
    def load_s(self) -> float:
        return self._stream.load_s

    @property
    def first_group_wait_s(self) -> float | None:
        return self._stream.first_group_wait_s

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self._stream)

    def drain_ready(self, max_tokens: int, idle: Idle | None = None) -> list[RolloutGroup]:
        """As ``GroupStream.drain_ready``; what was taken together before is so again, whatever
        ``max_tokens``.

        Raises ``JournalError``.
        """
        if self._drains:
            taken = self._drains.popleft()
            groups = self._stream.take([self._positions[key] for key in taken.keys])
        else:
            groups = self._stream.drain_ready(max_tokens, idle)
        if groups:
            self._add_drain([group.prompt.key for group in groups], max_tokens, self._ahead)
            self._ahead = []
        return groups

    def note_ahead(self, piece: Sequence[FinishedSamples]) -> None:
        """These responses were computed ahead, in one piece and in this order."""
        self._ahead.append([(each.prompt.key, list(each.completions)) for each in piece])

    def ahead_of_drain(self, max_tokens: int) -> Iterator[list[FinishedSamples]]:
        """What an earlier attempt computed ahead before it took what ``drain_ready`` gives next.

        Pieces in order; without those of which a response is not known, which there are only in a
        batch that no attempt has closed. Raises ``JournalError``.
        """
        for piece in self._drains[0].ahead if self._drains else ():
            samples = [self._samples(key, numbers) for key, numbers in piece]
            whole = [each for each in samples if each is not None]
            if len(whole) == len(samples):
                yield whole

    def _samples(self, key: Key, numbers: Sequence[int]) -> FinishedSamples | None:
        group = self._recover(key)
        if group is None or not all(n < len(group.completions) for n in numbers):
            return None  # or it was excluded
        return FinishedSamples(group.prompt, {n: group.completions[n] for n in numbers})

    def complete(self) -> None:
        self._stream.complete()

    def close(self) -> None:
        self._stream.close()

    def interrupt(self, error: BaseException) -> None:
        self._stream.interrupt(error)
