"""The batches of a run on records: each record is a finished group from the start.

Consumes: records, at the positions of the run's order from a cursor on. Waits for: nothing.
Produces: for each batch the groups of this data-parallel rank, all of them ready.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.dataloaders.producer.group_stream import GroupStream, ReadyGroup, packed_tokens
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.dataloaders.supervised.dataset import record_digest
from easyrl.schema import (
    Completion,
    ExcludedPrompt,
    GroupOutcome,
    Key,
    Prompt,
    RolloutGroup,
    ServedWeights,
    SupervisedRecord,
)


def group_of(
    record: SupervisedRecord, prompt: Prompt, *, version: str = "", position: int = 0
) -> RolloutGroup:
    """A record as the trainer takes it: unscored, of nobody's sampling.

    ``prompt`` is the record's, of an epoch; ``version`` that of the weights it is to train.
    """
    now_s = time.monotonic()
    completions = tuple(
        Completion(
            token_ids=given.token_ids,
            logprobs=np.zeros(len(given.token_ids), np.float32),
            finish_reason="stop",
            version_spans=(),
            endpoint="",
            loss_mask=given.loss_mask,
        )
        for given in record.completions
    )
    return RolloutGroup(
        prompt=prompt,
        completions=completions,
        scores=(),
        policy_version=version,
        dispatched_s=now_s,
        completed_s=now_s,
        position=position,
        digest=record_digest(record),
    )


@dataclass(frozen=True)
class RecordBatch:
    """The records of one batch (``trainer.parts.OpenBatch``)."""

    updates: Sequence[GroupStream]
    membership: BatchMembership
    accepted_versions: Collection[str]
    refused: Sequence[GroupOutcome] = ()
    discarded: Collection[Key] = ()
    withdrawn: str | None = None

    def close(self) -> None:
        for update in self.updates:
            update.close()


@dataclass
class RecordBatches:
    """A training run's groups, from records (``trainer.parts.Rollouts``).

    Position p of a batch belongs to data-parallel rank p mod n.
    """

    records: Sequence[SupervisedRecord]
    order: PromptOrder  # of their prompts
    batch_size: int  # records, of all ranks
    dp_rank: int = 0
    dp_size: int = 1
    _open: RecordBatch | None = field(default=None, init=False)

    @property
    def num_waiting(self) -> int:
        """Records of the open batch that the trainer has not taken. From any thread."""
        opened = self._open
        return 0 if opened is None else sum(stream.waiting for stream in opened.updates)

    @property
    def progress(self) -> BatchProgress | None:
        """Of the batch that was begun last. From any thread."""
        opened = self._open
        return None if opened is None else BatchProgress.of(opened.membership, opened.updates)

    def has_more(self, position: int) -> bool:
        return self.order.num_left(position) != 0

    def begin(
        self, served: ServedWeights, position: int, excluded: Sequence[ExcludedPrompt] = ()
    ) -> RecordBatch:
        """The batch that begins at ``position`` of the order."""
        version = str(served.version)
        membership = BatchMembership(self.batch_size, num_left=self.order.num_left(position))
        size = membership.bound
        stream = GroupStream(cancel=lambda: None, in_prompt_order=True)
        stream.accepted_versions = frozenset({version})
        for place in range(size):
            membership.decide(place, accepted=True)
            if place % self.dp_size == self.dp_rank:
                prompt = self.order.prompt(position + place)
                record = self.records[prompt.index]
                group = group_of(record, prompt, version=version, position=place)
                stream.put(ReadyGroup(prompt.key, packed_tokens(group), group))
        stream.end()
        self._open = RecordBatch([stream], membership, stream.accepted_versions)
        return self._open

    def sync(self) -> None:
        """Nothing is journalled."""

    def share_withdrawals(self) -> None:
        """Nothing is ever withdrawn."""

    def withdraw_endpoints(self, problems: Mapping[str, str]) -> None:
        """There is no endpoint."""
