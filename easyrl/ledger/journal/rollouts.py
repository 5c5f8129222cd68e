"""Producer with the journal behind it: a batch's groups, generated once and kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from easyrl.dataloaders.producer.draws import Draws, OneRank, SharedDecisions
from easyrl.dataloaders.producer.group_batch import GroupBatch
from easyrl.dataloaders.producer.group_stream import GroupStream, Idle
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_samples import OpenSamples
from easyrl.dataloaders.producer.rollout_generator import Accept, RolloutGenerator, accept_all
from easyrl.ledger.journal.batch import BatchJournal, Journal, Production, StoredRecord
from easyrl.ledger.journal.codec import DrainRecord, Piece
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    BatchWithdrawn,
    FinishedSamples,
    GroupOutcome,
    Key,
    PeerOutage,
    Prompt,
    RolloutGroup,
    ServedWeights,
)


class Order(Protocol):
    """Position → prompt (``PromptOrder``)."""

    def num_left(self, position: int) -> int | None: ...
    def prompt(self, position: int) -> Prompt: ...


class Coordination(Protocol):
    """How the ranks of a batch hear of each other (``RankCoordination``)."""

    def open_batch(self, name: str) -> SharedDecisions:
        """For the batch ``name``, the same on all ranks."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able ``value``. Collective."""
        ...


@dataclass(frozen=True)
class BatchRules:
    """How batches are made up (docs/on_policy.md).

    Attributes:
        batch_size: B, accepted groups.
        num_updates: k, optimizer steps on each batch.
        max_draws: prompts that one batch may draw at most.
        accept: a group's reason to be replaced, or None.
        in_prompt_order: strict mode: position p belongs to data-parallel rank p mod n, and groups
            come in the order of their prompts; else a rank with room claims the next position, and
            what an earlier attempt drained at once is drained so again.
    """

    batch_size: int
    num_updates: int = 1
    max_draws: int | None = None
    accept: Accept = accept_all
    in_prompt_order: bool = False


class JournalledRollouts:
    """Generates only what was not finished before with the same weights, and journals it."""

    def __init__(
        self,
        generator: RolloutGenerator,
        journal: Journal,
        order: Order,
        rules: BatchRules,
        ranks: Ranks,
        coordination: Coordination,
    ) -> None:
        self._generator = generator
        self._journal = journal
        self._order = order
        self._rules = rules
        self._ranks = ranks
        self._coordination = coordination
        self._batch: BatchJournal | None = None
        self._open: OpenBatch | None = None
        self._shared: SharedDecisions = OneRank()
        self._doubted: dict[str, int] = {}  # endpoint → proof, since the batch began
        # Told of the endpoints, on every rank, before the batch begins again: it must not use them.
        self.on_withdrawal: Callable[[Sequence[str]], object] = lambda urls: None

    def withdraw(self, endpoint: str, proof: int) -> None:
        """Takes back what ``endpoint`` has made for the open batch since its proof ``proof``.

        The batch begins again without it, on all ranks. On the producer's loop; raises
        ``JournalError``.
        """
        self._doubted.setdefault(
            endpoint, proof
        )  # seen at the end of ``begin`` where that is under way
        if self._batch is None or self._open is None:
            return
        reason = f"{endpoint} failed its proof"  # said even if the record finds the disk full
        try:
            num_groups = self._batch.withdraw(endpoint, proof)
            reason += (
                ": groups with responses that it has made since its proof number "
                f"{proof} are withdrawn and generated again ({num_groups} of rank "
                f"{self._ranks.dp_rank}, not counting open ones)"
            )
        finally:
            self._open.withdraw(reason)
            self._shared.announce_withdrawal(reason)

    def share_withdrawals(self) -> None:
        """What one rank's proof has put in doubt, all ranks withdraw. Collective.

        Another rank's numbers of proofs are its own: all that the endpoint has made for the open
        batch is in doubt here.
        """
        mine, self._doubted = set(self._doubted), {}
        everyone = {url for rank in self._coordination.gather(sorted(mine)) for url in rank}
        for endpoint in sorted(everyone - mine):
            if self._batch is not None:
                self._batch.withdraw(endpoint, 0)
        self.on_withdrawal(sorted(everyone))

    def in_doubt(self) -> dict[str, int]:
        """Last good proof of each endpoint that has failed one, and no batch has begun again."""
        return dict(self._doubted)

    @property
    def num_waiting(self) -> int:
        """Groups of the open batch that are finished and not handed out. From any thread."""
        return 0 if self._open is None else self._open.num_waiting

    def has_more(self, position: int) -> bool:
        """Whether the order has a prompt at ``position``."""
        return self._order.num_left(position) != 0

    def begin(self, served: ServedWeights, position: int) -> OpenBatch:
        """Starts the batch that begins at ``position`` of the order; collective.

        Again for the same weights: the batch starts again from what was journalled. Raises
        ``JournalError`` where what earlier attempts left is not as it was written.
        """
        if self._batch is not None and self._batch.served == served:
            journal = self._batch
            journal.begin_again()
        else:
            self.close()
            self._doubted.clear()
            journal = self._batch = self._journal.open_batch(served)
        rules, ranks = self._rules, self._ranks

        def prompt_at(place: int) -> Prompt:
            return self._order.prompt(position + place)

        membership = BatchMembership(
            rules.batch_size,
            rules.num_updates,
            num_left=self._order.num_left(position),
            max_draws=rules.max_draws,
        )
        mine = self._decide_known(membership, journal, prompt_at)
        known_updates = {p: membership.update_of(p) for p in mine}  # before others are decided
        polls = ranks.dp_size > 1
        self._shared = self._coordination.open_batch(f"{served.version}/{journal.num_restarts}")
        draws = Draws(
            membership,
            self._shared,
            fixed=(ranks.dp_rank, ranks.dp_size) if rules.in_prompt_order else None,
            room=-(-rules.batch_size // ranks.dp_size) if polls else None,
            polls=polls,
        )
        generated = self._generator.produce_batch(
            draws,
            prompt_at,
            str(served.version),
            num_updates=rules.num_updates,
            store=Production(journal),
            recovered=sorted(mine.items()),
            accept=rules.accept,
        )
        accepted = {p: stored for p, stored in mine.items() if not stored.refused}
        drains: Sequence[DrainRecord] = ()
        if not rules.in_prompt_order:
            # A group that was lost since then may have shifted those behind it to another update.
            certain = {stored.prompt.key: known_updates[p] for p, stored in accepted.items()}
            drains = journal.drained_before(certain)
        by_key = {stored.prompt.key: stored for stored in accepted.values()}
        opened = self._open = OpenBatch(generated, journal, drains, by_key)
        draws.on_withdrawal = opened.withdraw
        draws.on_failure = opened.fail
        if self._doubted:  # meanwhile, where the batch that was open before was told
            reason = f"{', '.join(self._doubted)} failed its proof while the batch began"
            opened.withdraw(reason)
            self._shared.announce_withdrawal(reason)
        return opened

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
            self._batch = self._open = None

    def _decide_known(
        self,
        membership: BatchMembership,
        journal: BatchJournal,
        prompt_at: Callable[[int], Prompt],
    ) -> dict[int, StoredRecord]:
        """Decides what the journal knows, on all ranks the same; this rank's groups by position.

        What all earlier attempts left is read by every rank; what this attempt has journalled
        before the batch began again is known to the rank that did.
        """
        ranks = self._ranks
        added: dict[int, bool] = {}  # by position, of all ranks
        if journal.num_restarts:
            own = [(stored.position, not stored.refused) for stored in journal.added]
            added = {p: yes for rank in self._coordination.gather(own) for p, yes in rank}
        mine: dict[int, StoredRecord] = {}
        position = 0
        while position < membership.bound:
            stored = journal.find(prompt_at(position))
            if stored is not None:
                membership.decide(position, not stored.refused)
                rank = position if self._rules.in_prompt_order else stored.rank
                if not stored.is_recovered or rank % ranks.dp_size == ranks.dp_rank:
                    mine[position] = stored
            elif position in added:
                membership.decide(position, added[position])
            position += 1
        return mine


class OpenBatch:
    """One batch in the making: its groups by optimizer step, and what is known of its prompts.

    Attributes:
        updates: the groups of each optimizer step.
        accepted_versions: those a token of this batch may be stamped with.
        discarded: prompts whose journalled groups are of other weights or settings, or were
            withdrawn, and are generated again.
        withdrawn: why groups of it were taken back.
    """

    def __init__(
        self,
        groups: GroupBatch,
        journal: BatchJournal,
        drains: Sequence[DrainRecord],
        stored: Mapping[Key, StoredRecord],
    ) -> None:
        self._groups = groups
        self.withdrawn: str | None = None
        self.accepted_versions = journal.accepted_versions
        self.discarded = journal.discarded
        self.updates = [
            JournalledStream(
                stream,
                journal.accepted_versions,
                drains=[drain for drain in drains if drain.update == update],
                recover=lambda key: stored[key].load() if key in stored else None,
                add_drain=lambda keys, tokens, ahead, update=update: journal.add_drain(  # type: ignore[misc]
                    keys, tokens, update, ahead
                ),
            )
            for update, stream in enumerate(groups.streams)
        ]

    @property
    def refused(self) -> Sequence[GroupOutcome]:
        """This rank's rejected and excluded groups; all of them when the last update has ended."""
        return self._groups.refused

    @property
    def membership(self) -> BatchMembership:
        """Of all ranks; complete when the last update has ended."""
        return self._groups.membership

    @property
    def num_waiting(self) -> int:
        return self._groups.num_waiting

    def withdraw(self, reason: str) -> None:
        """The batch has to begin again: whoever waits for a group raises ``BatchWithdrawn``."""
        if self.withdrawn is not None:
            return
        self.withdrawn = reason
        for stream in self.updates:
            stream.interrupt(BatchWithdrawn(reason))

    def fail(self, reason: str) -> None:
        """Another rank decides nothing any more: who waits for a group raises ``PeerOutage``."""
        for stream in self.updates:
            stream.interrupt(PeerOutage(reason))

    def close(self) -> None:
        """Gives up what is not finished. Safe to call twice."""
        for stream in self.updates:
            stream.close()


class JournalledStream:
    """A ``GroupStream``, and what the journal knew of its prompts.

    Args:
        drains: what an earlier attempt drained at once: it is handed out first, and so again.
        recover: an earlier attempt's group, if it is known.
        add_drain: is told the keys and ``max_tokens`` of each drain, and what was computed ahead
            since the one before.

    Attributes:
        accepted_versions: those its tokens may be stamped with.
    """

    def __init__(
        self,
        stream: GroupStream,
        accepted_versions: frozenset[str],
        *,
        drains: Sequence[DrainRecord] = (),
        recover: Callable[[Key], RolloutGroup | None] = lambda key: None,
        add_drain: Callable[[Sequence[Key], int, Sequence[Piece]], object] = lambda *drain: None,
    ) -> None:
        self._stream = stream
        self._drains = deque(drains)
        self._recover = recover
        self._add_drain = add_drain
        self._ahead: list[Piece] = []  # since the last drain
        self.accepted_versions = accepted_versions

    @property
    def recovered(self) -> Collection[Key]:
        """Prompts whose groups an earlier attempt has finished, as far as they were handed out."""
        return self._stream.recovered

    @property
    def open_samples(self) -> OpenSamples:
        """Finished responses of groups that are not complete."""
        return self._stream.open_samples

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
        """As ``GroupStream.drain_ready``; what was drained at once before is so again, whatever
        ``max_tokens``.

        Raises ``JournalError``.
        """
        if self._drains:
            groups = self._stream.drain(self._drains.popleft().keys)
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
        """What an earlier attempt computed ahead before it drained what ``drain_ready`` gives next.

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
            return None
        return FinishedSamples(group.prompt, {n: group.completions[n] for n in numbers})

    def complete(self) -> None:
        self._stream.complete()

    def close(self) -> None:
        self._stream.close()

    def interrupt(self, error: BaseException) -> None:
        self._stream.interrupt(error)
