"""Certificate and checkpoints behind one interface, which the training loop is given."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field
from pathlib import Path

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.records import BatchRecord
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.checkpoints.folder import KEPT_FOR
from easyrl.ledger.journal.batch import Journal
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.runtime.schedule import Due
from easyrl.schema import Progress

logger = logging.getLogger(__name__)


def resume(
    checkpoints: Checkpoints,
    order: PromptOrder,
    reference: str | None,
    at_most: int | None = None,
) -> Progress:
    """Engine and random state as they were saved; without a checkpoint, the beginning. Collective.

    ``reference`` as for ``Ledger``; ``at_most``: a checkpoint of that step or earlier. Raises
    ``ValueError`` if the settings are not those of the checkpoint.
    """
    state = checkpoints.load_latest(at_most=at_most)
    if state is None:
        _refuse_complete_run(checkpoints.folder.directory.parent)
        logger.warning(
            "%s holds no checkpoint: the run begins with its first batch, what the journal "
            "has is not generated again",
            checkpoints.folder.directory,
        )
        return Progress()
    if state["reference"] != reference:
        raise ValueError(
            "the model at model.path, which is frozen, is not the one that the checkpoint "
            "was trained with, or recipe.teacher or critic.path is not; restore it, or keep "
            "recipe.kl_coef and kl_in_reward_coef as they were"
        )
    order.position(state["cursor"])  # refuses another order
    return Progress(**state["progress"])


@dataclass
class Ledger:
    """Writes a batch down before it counts. All ranks call every method."""

    certificate: Certificate | None  # on the first rank
    checkpoints: Checkpoints
    order: PromptOrder
    collectives: Collectives
    _: KW_ONLY
    every_steps: int  # between two checkpoints; 0: only where one is asked for
    step: InitVar[int] = 0  # that the run goes on from
    # of the rank that removes batches from it that no checkpoint needs; None: nothing is removed
    journal: Journal | None = None
    reference: str | None = None  # ``reference_identity``, which a checkpoint has to agree with
    _saved_step: int = field(default=-1, init=False)  # in this attempt

    def __post_init__(self, step: int) -> None:
        self._due = Due(self.every_steps, step)

    def check(self, account: BatchRecord, *, whole: bool) -> None:
        """``Certificate.check``: whether it may be trained on. Raises ``CertificateError``."""
        if self.certificate is not None:
            self.certificate.check(account, whole=whole)

    def close_batch(self, account: BatchRecord) -> None:
        """Certifies a batch: its line is on the disk before any rank goes on."""
        if self.certificate is not None:
            self.certificate.close_batch(account)
        self.collectives.all_gather(None)

    def save(self, progress: Progress, *, kept_for: str = "") -> None:
        """Returns when there is a checkpoint of ``progress``.

        ``kept_for``: why it stays, however many are written behind it.
        """
        if self._saved_step != progress.step or kept_for:
            self._save(progress, kept_for)
        self.checkpoints.wait()

    def save_if_due(self, progress: Progress) -> None:
        """Every ``every_steps`` steps; lets go what is not needed any more of the journal."""
        if not self._due.passes(progress.step):
            return
        if self._saved_step != progress.step:
            self._save(progress)
        oldest = next(self.checkpoints.folder.readable(), None)
        if self.journal is not None and oldest is not None:
            self.journal.prune(int(oldest[1]["state"]["journal"]["batch"]))

    def end(self, progress: Progress, weights: str) -> None:
        """The run is complete, and has the weights with this digest.

        It can be extended from its last step, if it writes checkpoints at all.
        """
        if self.every_steps:
            self.save(progress)
        if self.certificate is not None:
            self.certificate.end(weights)

    def _save(self, progress: Progress, kept_for: str = "") -> None:
        """Returns when the state is copied, it may still be being written."""
        state = {
            "progress": asdict(progress),
            "cursor": self.order.cursor(progress.position),
            "reference": self.reference,
            "journal": {"batch": progress.closed_batches},  # the first that it needs
        }
        if kept_for:
            state[KEPT_FOR] = kept_for
        self.checkpoints.save(progress.step, state)
        self._saved_step = progress.step


def _refuse_complete_run(output: Path) -> None:
    """Without a checkpoint, there is nothing that a complete run could be extended from."""
    file = output / CERTIFICATE_FILE
    lines = file.read_bytes().splitlines() if file.exists() else []
    if lines and b'"kind":"end"' in lines[-1]:
        raise ValueError(
            f"{output} is complete and has no checkpoint that it could be extended from; train "
            f"{output / 'model'} further in a new run, with checkpoint.every_steps set"
        )
