"""Producer with the journal behind it: a batch's groups, generated once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from easyrl.dataloaders.producer.balance import Balance, GroupCost
from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.producer.open_batch import OpenBatch
from easyrl.dataloaders.producer.rollout_generator import Accept, RolloutGenerator
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.exclusions import ExclusionLimit
from easyrl.ledger.journal.batch import BatchJournal, Journal, Production
from easyrl.ledger.journal.codec import EVER
from easyrl.ledger.journal.earlier_attempts import StoredRecord
from easyrl.runtime.rank_coordination import RankCoordination
from easyrl.runtime.ranks import Ranks
from easyrl.schema import (
    ExcludedPrompt,
    Exclusion,
    JournalledTurn,
    Key,
    Prompt,
    ServedWeights,
    TooManyExcluded,
)


@dataclass(frozen=True)
class BatchRules:
    """How batches are made up (docs/on_policy.md)."""

    batch_size: int  # B, accepted groups
    num_updates: int = 1  # k, optimizer steps on each batch
    max_draws: int | None = None  # prompts that one batch may draw at most
    max_excluded: float = 1.0  # data.max_excluded
    accept: Accept = lambda group: None
    # Strict mode: position p belongs to data-parallel rank p mod n, and groups come in the order of
    # their prompts; else a rank with room claims the next position, and what an earlier attempt
    # drained at once is drained so again.
    in_prompt_order: bool = False
    # By which a finished group goes to the rank with the least to train; None, or in prompt order:
    # the rank that drew it trains it.
    cost_of: GroupCost | None = None
    trained_at_end: bool = False  # all of a step's groups are taken before the first is trained


class Known(NamedTuple):
    """What the journal has of a batch that begins, for this rank."""

    mine: dict[int, StoredRecord]  # by position, this rank trains them
    elsewhere: dict[Key, StoredRecord]  # other ranks train them, or nobody does
    # not drawn yet, of what was journalled before the batch began again: whether it is this rank's
    kept: dict[int, bool]


@dataclass
class JournalledRollouts:
    """Generates only what was not finished before with the same weights, and journals it."""

    generator: RolloutGenerator
    journal: Journal
    order: PromptOrder
    rules: BatchRules
    ranks: Ranks
    coordination: RankCoordination
    # Told of the endpoints, on every rank, before the batch begins again, and why they must not be
    # used any more; None: not until they prove themselves anew.
    on_withdrawal: Callable[[Mapping[str, str | None]], object] = lambda endpoints: None
    # Told, on the producer's loop, whenever a group of the open batch is decided.
    on_decision: Callable[[], object] = lambda: None
    # Told of each endpoint, and since which of its proofs, of which responses are taken back.
    on_doubt: Callable[[str, int], object] = lambda endpoint, proof: None
    _batch: BatchJournal | None = field(default=None, init=False)
    _open: OpenBatch | None = field(default=None, init=False)
    # endpoint → proof, since the batch began or the one before has ended
    _doubted: dict[str, int] = field(default_factory=dict, init=False)
    _excluded: dict[str, str] = field(default_factory=dict, init=False)  # endpoint → reason

    def add_turn(self, version: str | None, turn: JournalledTurn) -> None:
        """Journals a turn that was asked of ``version``, if that is the open batch's.

        On the producer's loop; raises ``JournalError``.
        """
        batch = self._batch
        if batch is not None and str(batch.served.version) == version:
            batch.add_turn(turn)

    def withdraw_endpoints(self, problems: Mapping[str, str]) -> None:
        """Takes back all that endpoints have made for the open batch, also in earlier attempts.

        ``problems``: by endpoint, why it is not used any more. The batch begins again without them,
        on all ranks. From the trainer's thread; raises ``JournalError``.
        """

        async def take_back() -> None:
            self._excluded |= problems
            for endpoint, problem in problems.items():
                self.withdraw(endpoint, EVER, problem)

        self.generator.thread.run(take_back())

    def withdraw(self, endpoint: str, proof: int, problem: str = "failed its proof") -> None:
        """Takes back what ``endpoint`` has made for the open batch since its proof ``proof``.

        The batch begins again without it, on all ranks. On the producer's loop; raises
        ``JournalError``.
        """
        self.on_doubt(endpoint, proof)
        # seen at the end of ``begin`` where that is under way, or yet to come
        self._doubted[endpoint] = min(proof, self._doubted.get(endpoint, proof))
        batch, opened = self._batch, self._open
        if batch is None or opened is None:
            return
        reason = f"{endpoint} {problem}"  # said even if the record finds the disk full
        since = "" if proof == EVER else f" since its proof number {proof}"
        try:
            num_groups = batch.withdraw(endpoint, proof)
            reason += (
                f": groups with responses that it has made{since} "
                f"are withdrawn and generated again ({num_groups} of rank "
                f"{self.ranks.dp_rank}, not counting open ones)"
            )
        finally:
            opened.withdraw(reason)

    def share_withdrawals(self) -> None:
        """What one rank's proof has put in doubt, all ranks withdraw. Collective.

        Another rank's numbers of proofs are its own: all that the endpoint has made for the open
        batch is in doubt here.
        """
        mine, self._doubted = self._doubted, {}
        told: list[list[tuple[str, str | None]]] = self.coordination.gather(
            [(url, self._excluded.get(url)) for url in sorted(mine)]
        )
        self._excluded = {}
        everyone: dict[str, str | None] = {}
        for rank in told:
            everyone |= {url: problem or everyone.get(url) for url, problem in rank}
        for endpoint, problem in sorted(everyone.items()):
            # Mine too: what was withdrawn while the batch began has an earlier number.
            proof = mine.get(endpoint, 0) if problem is None else EVER
            self.on_doubt(endpoint, proof)
            if self._batch is not None:
                self._batch.withdraw(endpoint, proof)
        self.on_withdrawal(everyone)

    def end_batch(self) -> dict[str, int]:
        """The weights are about to move: what fails a proof from now on is of the next batch.

        Gives the last good proof of each endpoint that has failed one since the batch was looked at
        last. To be called while no endpoint is confirmed. The batch's journal stays open for
        ``sync``.
        """
        self._open = None
        doubted, self._doubted = self._doubted, {}
        return doubted

    @property
    def num_waiting(self) -> int:
        """Groups of the open batch that are finished and not handed out. From any thread."""
        opened = self._open
        return 0 if opened is None else opened.num_waiting

    @property
    def num_undecided(self) -> int:
        """Groups that the open batch may still ask for or replace, this rank's share of them.

        From any thread.
        """
        opened = self._open
        return 0 if opened is None else -(-opened.membership.num_undecided // self.ranks.dp_size)

    @property
    def progress(self) -> BatchProgress | None:
        """Of the open batch; None between two. From any thread."""
        opened = self._open
        return None if opened is None else opened.progress

    def has_more(self, position: int) -> bool:
        """Whether the order has a prompt at ``position``."""
        return self.order.num_left(position) != 0

    def begin(
        self, served: ServedWeights, position: int, excluded: Sequence[ExcludedPrompt] = ()
    ) -> OpenBatch:
        """Starts the batch that begins at ``position`` of the order; collective.

        ``excluded`` are those of closed batches that still count (``Progress.excluded``). Again for
        the same weights: the batch starts again from what was journalled. Raises ``JournalError``
        where what earlier attempts left is not as it was written, ``TooManyExcluded`` where that
        has too many exclusions.
        """
        if self._batch is not None and self._batch.served == served:
            journal = self._batch
            journal.begin_again()
        else:
            self.close()
            journal = self._batch = self.journal.open_batch(served)
        rules, ranks = self.rules, self.ranks

        def prompt_at(place: int) -> Prompt:
            return self.order.prompt(position + place)

        membership = BatchMembership(
            rules.batch_size,
            rules.num_updates,
            num_left=self.order.num_left(position),
            max_draws=rules.max_draws,
        )
        limit = ExclusionLimit(
            rules.max_excluded,
            rules.batch_size,
            excluded,
            location=lambda e: self.order.prompt(e.position).location or f"prompt {e.prompt_index}",
        )

        def count(place: int, exclusion: Exclusion) -> str | None:
            if exclusion.kind == "refused":
                epoch, index = prompt_at(place).key
                limit.add(ExcludedPrompt(position + place, epoch, index, exclusion.reason))
            return limit.problem()

        mine, elsewhere, kept = self._decide_known(membership, journal, prompt_at, count)
        if (problem := limit.problem()) is not None:  # on all ranks
            raise TooManyExcluded(problem)
        # A group that was lost since then may have shifted those behind it to another update.
        updates = {prompt_at(p).key: membership.update_of(p)
                   for p, stored in mine.items() if not stored.refused}  # fmt: skip
        draws = Draws(membership, count=count)
        if ranks.dp_size > 1:
            shared = self.coordination.open_batch(f"{served.version}/{journal.num_restarts}")
            balance = None
            if rules.cost_of is not None and not rules.in_prompt_order:
                balance = Balance(shared, ranks.dp_rank, rules.cost_of)
            draws = Draws(
                membership,
                shared,
                fixed=(ranks.dp_rank, ranks.dp_size) if rules.in_prompt_order else None,
                room=-(-rules.batch_size // ranks.dp_size),
                kept=kept,
                count=count,
                balance=balance,
            )
        batch = self.generator.produce_batch(
            draws,
            prompt_at,
            str(served.version),
            store=Production(journal),
            recovered=sorted(mine.items()),
            accept=rules.accept,
        )
        batch.on_decision = self.on_decision
        batch.accepted_versions, batch.discarded = journal.accepted_versions, journal.discarded
        drains = () if rules.in_prompt_order else journal.drained_before(updates)
        for update, stream in enumerate(batch.updates):
            stream.accepted_versions = journal.accepted_versions
            stream.past_drains.extend(drain for drain in drains if drain.update == update)
            stream.on_drain = partial(journal.add_drain, update)
            stream.elsewhere = elsewhere
            stream.trained_at_end = rules.trained_at_end
        self._open = batch
        # For what was decided before anybody was told: all, if nothing is left to be generated.
        self.generator.thread.loop.call_soon_threadsafe(self.on_decision)
        if self._doubted:  # meanwhile, where the batch that was open before was told
            batch.withdraw(f"{', '.join(self._doubted)} failed its proof while the batch began")
        return batch

    def sync(self) -> None:
        """``BatchJournal.sync`` of the batch that was begun last. Raises ``JournalError``."""
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
        count: Callable[[int, Exclusion], object],
    ) -> Known:
        """Decides what the journal knows, on all ranks the same.

        What all earlier attempts left is read by every rank, and each group is trained by the rank
        that it was handed over to, if it was; what this attempt has journalled before the batch
        began again is known to the rank that did, which trains it.
        """
        rank, num_ranks = self.ranks.dp_rank, self.ranks.dp_size
        added: dict[int, bool] = {}  # by position, of all ranks
        excluded: dict[int, Exclusion] = {}
        own = {stored.position for stored in journal.added}
        if journal.num_restarts:
            mine_told = [(s.position, not s.refused, s.exclusion) for s in journal.added]
            for of_rank in self.coordination.gather(mine_told):
                for place, accepted, exclusion in of_rank:
                    added[place] = accepted
                    if exclusion is not None:
                        excluded[place] = Exclusion(*exclusion)
        mine: dict[int, StoredRecord] = {}
        elsewhere: dict[Key, StoredRecord] = {}
        position = 0
        while position < membership.bound:
            prompt = prompt_at(position)
            stored = journal.find(prompt)
            if stored is not None:
                membership.decide(position, not stored.refused)
                if stored.exclusion is not None:
                    count(position, stored.exclusion)
                owner = position if self.rules.in_prompt_order else stored.trains
                if position in own or owner % num_ranks == rank:
                    mine[position] = stored
                if position not in mine or stored.refused:
                    elsewhere[prompt.key] = stored
            elif position in added:
                membership.decide(position, added[position])
                if position in excluded:
                    count(position, excluded[position])
            position += 1
        kept = {p: p in own for p in added if not membership.is_decided(p)}
        if self.rules.in_prompt_order:
            kept = {}  # a position is drawn by the rank that has drawn it before
        return Known(mine, elsewhere, kept)
