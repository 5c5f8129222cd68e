"""Certificate and checkpoints behind one interface, which the training loop is given."""

from __future__ import annotations

from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.saver import CheckpointSaver
from easyrl.runtime.collectives import Collectives
from easyrl.schema import Progress


class Ledger:
    """Writes a batch down before it counts. All ranks call every method.

    Consumes: the account of each batch. Waits for: the disk. Is unblocked by: it. Produces: the
    certificate's lines, checkpoints.

    Args:
        certificate: on the first rank; None on the others.
        saver: writes checkpoints.
    """

    def __init__(
        self, certificate: Certificate | None, saver: CheckpointSaver, collectives: Collectives
    ) -> None:
        self._certificate = certificate
        self._saver = saver
        self._collectives = collectives

    def check(self, account: BatchRecord, *, whole: bool) -> None:
        """Whether ``account`` may be trained on; ``whole``: the batch is over.

        Raises ``CertificateError`` naming batch, prompt or endpoint.
        """
        if self._certificate is not None:
            self._certificate.check(account, whole=whole)

    def close_batch(self, account: BatchRecord) -> None:
        """Certifies a batch: its line is on the disk before any rank goes on."""
        if self._certificate is not None:
            self._certificate.close_batch(account)
        self._collectives.all_gather(None)

    def save(self, progress: Progress) -> None:
        """Returns when there is a checkpoint of ``progress``."""
        self._saver.save_now(progress)

    def save_if_due(self, progress: Progress) -> None:
        self._saver.save_if_due(progress)

    def end(self, progress: Progress, weights: str) -> None:
        """The run is complete, and has the weights with this digest."""
        self._saver.save_at_end(progress)
        if self._certificate is not None:
            self._certificate.end(weights)
