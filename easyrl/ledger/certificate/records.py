"""The lines of a certificate."""

from __future__ import annotations

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


class EndRecord(msgspec.Struct, tag_field="kind", tag="end", frozen=True):
    """The run is complete."""

    weights: str  # hash of the final weights
    batches: int


Record = RunRecord | AttemptRecord | BatchRecord | EndRecord
