"""The run that a resumed attempt goes on with: whether it may, and whether anything is left to do.

Reads only: what is refused here has changed nothing.
"""

from __future__ import annotations

from pathlib import Path

from easyrl.ledger.certificate.chain import Line
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import AttemptRecord, RunRecord
from easyrl.ledger.certificate.writer import refuse_other_settings
from easyrl.runtime.run_files import CERTIFICATE_FILE


class EarlierRun:
    """What the certificate of a run's folder says, compared with ``run``, which is to go on.

    Raises ``CertificateError`` if it is broken, ``OtherSettings`` if it was begun with others.
    """

    def __init__(self, folder: Path, run: RunRecord) -> None:
        self._folder = folder
        self._history = History(folder / CERTIFICATE_FILE)
        if not (folder / CERTIFICATE_FILE).exists():
            return
        try:
            self._history.take_all()
            if self._history.run is not None:
                refuse_other_settings(self._history.run, run)
        except CertificateError as error:
            raise error.in_folder(folder) from error

    @property
    def is_complete(self) -> bool:
        """Whether its last attempt came to the end that its settings gave it."""
        return self._history.end is not None

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are in its weights."""
        return self._history.batches[-1].last_step if self._history.batches else 0

    @property
    def position(self) -> int:
        """Prompts of the order that its batches have drawn."""
        return self._history.num_drawn

    def refuse(self, attempt: AttemptRecord) -> None:
        """Raises ``CertificateError`` if ``attempt`` has no place behind what is there."""
        if self._history.run is None:
            return
        try:
            self._history.take(Line(), attempt)
        except CertificateError as error:
            raise error.in_folder(self._folder) from error
