"""What a batch's updates come to, as the certificate wants it."""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.ledger.certificate.records import BatchRecord, CertifiedGroup
from easyrl.metrics.batch_metrics import Update
from easyrl.schema import Confirmation, ServedWeights


def batch_record(
    updates: Sequence[Update],
    served: ServedWeights,
    step: int,
    confirmations: Sequence[Confirmation],
) -> BatchRecord:
    """The account of the batch up to the last of ``updates``, of all ranks.

    ``step`` counts the steps up to there. The log-probabilities are compared in the first update:
    later ones train weights that have moved on.
    """
    first = updates[0].totals.metrics
    num_tokens = first.sums.get("num_loss_tokens", 0.0)
    groups = [
        CertifiedGroup(
            epoch=group.epoch,
            index=group.index,
            outcome=update.outcome(group),
            digest=group.digest,
            stamped=group.stamped,
            endpoints=group.endpoints,
            recovered=group.recovered,
        )
        for update in updates
        for group in update.totals.groups
    ]
    return BatchRecord(
        batch=served.version.v,
        step=step,
        updates=[update.dispatched for update in updates],
        version=str(served.version),
        weights=served.digest,
        confirmations=list(confirmations),
        groups=sorted(groups, key=lambda group: (group.epoch, group.index)),
        discarded=sorted({key for update in updates for key in update.totals.discarded}),
        accepted_versions=sorted({v for u in updates for v in u.totals.accepted_versions}),
        logprob_max=first.maxima.get("logprob_diff_max"),
        logprob_mean=first.sums["logprob_diff_sum"] / num_tokens if num_tokens else None,
        skipped_updates=[i for i, update in enumerate(updates) if update.skipped],
        num_ranks=updates[0].totals.num_ranks,
    )
