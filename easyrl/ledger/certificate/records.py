"""The lines of a certificate."""

from __future__ import annotations

from typing import Literal

import msgspec

from easyrl.ledger.format import FORMAT
from easyrl.schema import Confirmation, EndedBy, EndpointAgreement, GroupOutcome, Key


class RunRecord(msgspec.Struct, tag_field="kind", tag="run", frozen=True):
    """The first line: which run, and what fixes the order of its prompts.

    What may change when a run is resumed is in each attempt's line.
    """

    run: str  # the first part of its policy versions
    seed: int
    shuffle: bool
    num_prompts: int
    batch_size: int
    data: str  # hash of the dataset
    source: Literal["rollouts", "records"] = "rollouts"  # what its batches are of
    format: int = FORMAT


class AttemptRecord(msgspec.Struct, tag_field="kind", tag="attempt", frozen=True):
    """A start of the run. What earlier attempts certified from ``first_batch`` on is superseded."""

    attempt: int  # the attempt of its policy versions
    num_ranks: int
    first_batch: int  # the first that it trains: closed batches of the checkpoint it starts from
    reason: str  # why it starts there
    epochs: int | None  # passes through the prompts; None: as many as its steps need
    updates_per_batch: int
    max_draws: int | None  # prompts that a batch may draw at most
    recipe: str | None = None  # digest of its name, keys and own file; None: not recorded
    # of each endpoint's mean |Δ log-prob| in a batch, nats (metrics/logprob_agreement.py); None:
    # not judged
    agreement_limit: float | None = None


class BatchRecord(msgspec.Struct, tag_field="kind", tag="batch", frozen=True, kw_only=True):
    """A closed batch, of all ranks."""

    batch: int  # v
    step: int  # optimizer steps up to its end
    version: str  # that its requests asked for
    weights: str  # hash of the weights that made it, 64 hex digits
    num_updates: int  # optimizer steps on it
    num_drawn: int  # prompts, from where the batch before ended in the order
    ended_by: EndedBy
    groups: list[GroupOutcome]  # of every drawn prompt, by position
    confirmations: list[Confirmation]
    accepted_versions: list[str]  # its own, and those of earlier attempts with the same weights
    # journalled by an earlier attempt, for other weights or not to be trained, and generated again
    discarded: list[Key]
    skipped_updates: list[int]  # which of the k
    logprob_max: float | None  # |inference - trainer| of the trained tokens, nats
    logprob_mean: float | None
    num_ranks: int
    agreement: list[EndpointAgreement] = []  # of each endpoint whose tokens were compared, by URL


class TrainedRecord(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """One supervised record of a batch."""

    epoch: int
    index: int
    position: int  # in the order, from the batch's first record
    outcome: Literal["trained", "skipped"]  # skipped: its optimizer step was
    digest: str  # of its tokens, and which of them are trained, 32 hex digits
    rank: int = 0  # data-parallel

    @property
    def key(self) -> Key:
        return self.epoch, self.index


class RecordsBatch(msgspec.Struct, tag_field="kind", tag="records", frozen=True, kw_only=True):
    """A closed batch of a run on records, of all ranks: one optimizer step."""

    batch: int
    step: int  # optimizer steps up to its end
    attempt: int
    ended_by: Literal["accepted", "data"]  # B records; the order's end
    groups: list[TrainedRecord]  # by position
    num_ranks: int

    @property
    def num_drawn(self) -> int:
        return len(self.groups)

    @property
    def num_updates(self) -> int:
        return 1


class EndRecord(msgspec.Struct, tag_field="kind", tag="end", frozen=True):
    """The run is complete."""

    weights: str  # hash of the final weights
    batches: int


Batch = BatchRecord | RecordsBatch
Record = RunRecord | AttemptRecord | Batch | EndRecord
