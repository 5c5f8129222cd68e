"""What a run on records is held to, as far as a batch's line tells: its records, each once.

The trainer asks before each optimizer step, ``easyrl verify`` asks again of every line. Whoever
asks says which batch it is: the errors name the record only.
"""

from __future__ import annotations

import re

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, RecordsBatch, RunRecord

DIGEST = re.compile(r"[0-9a-f]{32}")


def examine_records(
    batch: RecordsBatch, run: RunRecord, attempt: AttemptRecord, num_left: int | None
) -> None:
    """Raises ``CertificateError`` naming the record of the first violation.

    ``num_left``: records that the order had for it; None: no end.
    """
    if run.source != "records":
        raise CertificateError("is a batch of records in a run on rollouts")
    if batch.attempt != attempt.attempt:
        raise CertificateError(f"is of attempt {batch.attempt}, not {attempt.attempt}")
    size = run.batch_size if num_left is None else min(run.batch_size, num_left)
    ended_by = "accepted" if size == run.batch_size else "data"
    if len(batch.groups) != size or batch.ended_by != ended_by:
        raise CertificateError(
            f"has {len(batch.groups)} records (ended by {batch.ended_by}), its order had {size} "
            "for it"
        )
    keys = set()
    for position, record in enumerate(batch.groups):
        problem = None
        if record.key in keys:
            problem = "its record is there twice"
        elif record.position != position:
            problem = f"its record is at position {record.position}, {position} has none"
        elif record.outcome != batch.groups[0].outcome:
            problem = f"its record counts as {record.outcome}, others of its step do not"
        elif not DIGEST.fullmatch(record.digest):
            problem = "its record has no digest of its tokens"
        elif not 0 <= record.rank < batch.num_ranks:
            problem = f"its record was trained on rank {record.rank} of {batch.num_ranks}"
        if problem is not None:
            raise CertificateError(problem, key=record.key)
        keys.add(record.key)
