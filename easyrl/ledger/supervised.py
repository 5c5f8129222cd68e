"""The ledger of a run on records: which were trained, in the certificate's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from easyrl.ledger.certificate.records import BatchRecord, RecordsBatch, TrainedRecord
from easyrl.ledger.ledger import Ledger
from easyrl.schema import PolicyVersion, Progress


@dataclass
class RecordsLedger(Ledger):
    """Writes down which records a batch has trained; nothing of samples, weights and endpoints."""

    _: KW_ONLY
    final_weights: Callable[[], str]  # digest of the trained weights; collective

    def check(self, account: BatchRecord, *, whole: bool) -> None:
        if self.certificate is not None:
            self.certificate.check(records_batch(account), whole=whole)

    def close_batch(self, account: BatchRecord) -> None:
        if self.certificate is not None:
            self.certificate.close_batch(records_batch(account))
        self.collectives.all_gather(None)

    def end(self, progress: Progress, weights: str) -> None:
        """The weights are hashed here: no batch needs their digest."""
        super().end(progress, self.final_weights())


def records_batch(account: BatchRecord) -> RecordsBatch:
    """The line of a batch of records, from the account that the training loop makes."""
    groups = []
    for group in account.groups:
        assert group.accepted and group.digest is not None and group.update == 0
        groups.append(
            TrainedRecord(
                epoch=group.epoch,
                index=group.index,
                position=group.position,
                outcome="skipped" if group.outcome == "skipped" else "trained",
                digest=group.digest,
                rank=group.rank,
            )
        )
    assert account.ended_by != "max_draws"
    return RecordsBatch(
        batch=account.batch,
        step=account.step,
        attempt=PolicyVersion.parse(account.version).attempt,
        ended_by=account.ended_by,
        groups=groups,
        num_ranks=account.num_ranks,
    )
