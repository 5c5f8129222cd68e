"""The account of a closed batch: a certificate's record made of its optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from easyrl.engines.base import MetricSums
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.metrics.batch_metrics import Update
from easyrl.metrics.logprob_agreement import agreement
from easyrl.schema import Confirmation, EndedBy, GroupOutcome, Key, ServedWeights


def batch_account(
    updates: Sequence[Update],
    refused: Sequence[GroupOutcome],
    served: ServedWeights,
    step: int,
    confirmations: Sequence[Confirmation],
    *,
    accepted_versions: Collection[str],
    discarded: Collection[Key],
    ended_by: EndedBy = "accepted",
) -> BatchRecord:
    """The account of the batch up to the last of ``updates``, of all ranks.

    ``step`` counts the steps up to there. ``refused`` are its rejected and excluded groups. The
    log-probabilities' largest and mean difference are the first update's: later ones train weights
    that have moved on. Each endpoint is compared with the weights that it had, in every update.
    """
    first = updates[0].totals.metrics
    num_tokens = first.sums.get("num_loss_tokens", 0.0)
    difference = first.sums.get("logprob_diff_sum")  # None: nothing was sampled
    compared = MetricSums()
    for update in updates:
        compared.add(MetricSums(compared=update.totals.metrics.compared))
    groups = [
        msgspec.structs.replace(
            group, update=number, outcome="skipped" if update.skipped else "trained"
        )
        for number, update in enumerate(updates)
        for group in update.totals.groups
    ]
    groups = sorted([*groups, *refused], key=lambda group: group.position)
    return BatchRecord(
        batch=served.version.v,
        step=step,
        num_updates=len(updates),
        num_drawn=len(groups),
        ended_by=ended_by,
        version=str(served.version),
        weights=served.digest,
        confirmations=list(confirmations),
        groups=groups,
        discarded=sorted({group.key for group in groups}.intersection(discarded)),
        accepted_versions=sorted(accepted_versions),
        logprob_max=first.maxima.get("logprob_diff_max"),
        logprob_mean=None if difference is None or not num_tokens else difference / num_tokens,
        agreement=agreement(compared.compared),
        skipped_updates=[i for i, update in enumerate(updates) if update.skipped],
        num_ranks=updates[0].totals.num_ranks,
    )
