"""The producer with the journal behind it: what the trainer is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from easyrl.dataloaders.group_stream import GroupStream, Idle
from easyrl.dataloaders.open_samples import OpenSamples
from easyrl.dataloaders.rollout_generator import RolloutGenerator
from easyrl.journal.batch import BatchJournal, Journal
from easyrl.schema import Key, Prompt, RolloutGroup, ServedWeights


class JournalledRollouts:
    """Generates only what no earlier life has finished with the same weights, and journals it."""

    def __init__(self, generator: RolloutGenerator, journal: Journal) -> None:
        self._generator = generator
        self._journal = journal
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

        Raises ``JournalError`` where what earlier lives left is not as it was written.
        """
        if self._batch is None or self._batch.served != served:
            self.close()
            self._batch = self._journal.open_batch(served)
        before = self._batch.taken_before(prompts)
        stream = self._generator.produce(
            prompts, str(served.version), store=self._batch, priority=priority
        )
        self._streams = [*self._streams, stream]
        positions = {prompt.key: position for position, prompt in enumerate(prompts)}
        return JournalledStream(
            stream,
            self._batch.accepted_versions,
            self._batch.discarded & positions.keys(),
            takes=[[positions[key] for key in take.keys] for take in before],
            add_taken=self._batch.add_taken,
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
        takes: positions of prompts that an earlier life took together: they are handed out first,
            and so again.
        add_taken: is told the keys and ``max_tokens`` of each ``take_ready``.

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
        takes: Sequence[Sequence[int]] = (),
        add_taken: Callable[[Sequence[Key], int], object] = lambda keys, max_tokens: None,
    ) -> None:
        self._stream = stream
        self._takes = deque(takes)
        self._add_taken = add_taken
        self.accepted_versions = accepted_versions
        self.discarded = discarded

    @property
    def recovered(self) -> frozenset[Key]:
        """Prompts whose groups an earlier life has finished."""
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

    def take_ready(self, max_tokens: int, idle: Idle | None = None) -> list[RolloutGroup]:
        """As ``GroupStream.take_ready``; what was taken together before is so again, whatever
        ``max_tokens``.

        Raises ``JournalError``.
        """
        if self._takes:
            groups = self._stream.take(self._takes.popleft())
        else:
            groups = self._stream.take_ready(max_tokens, idle)
        if groups:
            self._add_taken([group.prompt.key for group in groups], max_tokens)
        return groups

    def complete(self) -> None:
        self._stream.complete()

    def close(self) -> None:
        self._stream.close()

    def interrupt(self, error: BaseException) -> None:
        self._stream.interrupt(error)
