"""The lines of a certificate."""

from __future__ import annotations

from typing import Literal

import msgspec

from easyrl.ledger.format import FORMAT
from easyrl.schema import Confirmation, Key, RolloutGroup

Outcome = Literal["trained", "skipped", "excluded"]


class RunRecord(msgspec.Struct, tag_field="kind", tag="run", frozen=True):
    """The first line: which run, and what fixes the order of its prompts.

    ``epochs`` and ``updates_per_batch`` may change when a run is resumed; each attempt has its own.
    """

    run: str  # the first part of its policy versions
    seed: int
    shuffle: bool
    epochs: int
    num_prompts: int
    batch_size: int
    updates_per_batch: int
    data: str  # hash of the dataset
    format: int = FORMAT


class AttemptRecord(msgspec.Struct, tag_field="kind", tag="attempt", frozen=True):
    """A start of the run. What earlier attempts certified from ``first_batch`` on is superseded."""

    attempt: int  # the attempt of its policy versions
    num_ranks: int
    first_batch: int  # the first that it trains: closed batches of the checkpoint it starts from
    reason: str = ""  # why it starts there
    epochs: int = 1  # these two are filled in from the RunRecord
    updates_per_batch: int = 1


class CertifiedGroup(msgspec.Struct, omit_defaults=True, frozen=True):
    """What became of one dispatched prompt."""

    epoch: int
    index: int
    outcome: Outcome  # skipped: its optimizer step was; excluded: it has no usable responses
    digest: str | None  # of its journal record, 32 hex digits; None: not journalled
    stamped: list[str]  # versions on its tokens, sorted
    endpoints: list[str]  # URLs that made them, sorted
    recovered: bool = False  # from the journal of an earlier attempt

    @property
    def key(self) -> Key:
        return self.epoch, self.index

    @classmethod
    def of(cls, group: RolloutGroup, outcome: Outcome, *, recovered: bool) -> CertifiedGroup:
        """What the certificate says of ``group``."""
        return cls(
            group.prompt.epoch,
            group.prompt.index,
            outcome,
            group.digest,
            sorted({span.version for c in group.completions for span in c.version_spans}),
            sorted({c.endpoint for c in group.completions}),
            recovered,
        )


class BatchRecord(msgspec.Struct, tag_field="kind", tag="batch", frozen=True, kw_only=True):
    """A closed batch, of all ranks."""

    batch: int  # v
    step: int  # optimizer steps up to its end
    version: str  # that its requests asked for
    weights: str  # hash of the weights that made it, 64 hex digits
    updates: list[list[Key]]  # prompts of update i of k, in the order of the dataset
    groups: list[CertifiedGroup]  # by key
    confirmations: list[Confirmation]
    accepted_versions: list[str]  # its own, and those of earlier attempts with the same weights
    discarded: list[Key]  # journalled for other weights by an earlier attempt, generated again
    skipped_updates: list[int]  # which of the k
    logprob_max: float | None  # |inference - trainer| of the trained tokens, nats
    logprob_mean: float | None
    num_ranks: int


class EndRecord(msgspec.Struct, tag_field="kind", tag="end", frozen=True):
    """The run is complete."""

    weights: str  # hash of the final weights
    batches: int


Record = RunRecord | AttemptRecord | BatchRecord | EndRecord
