"""What outlives an attempt of the run: checkpoints, journal, certificate (docs/on_policy.md)."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from blake3 import blake3

from easyrl.config import Config, ConfigError
from easyrl.dataloaders.prompts.dataset import PromptBatches
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, RunRecord
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.checkpoints.export import WEIGHT_SUFFIXES
from easyrl.ledger.checkpoints.state_file import file_blake3
from easyrl.ledger.journal import Journal
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Agreement
from easyrl.runtime.run_folder import CERTIFICATE_FILE
from easyrl.schema import PolicyVersion
from easyrl.trainer.loop import AfterReport, Notary, Progress

logger = logging.getLogger(__name__)


class Due:
    """Every so many steps, also where a batch takes several at once."""

    def __init__(self, every_steps: int, step: int) -> None:
        self._every_steps = every_steps
        self._step = step

    def passes(self, step: int) -> bool:
        """Whether a multiple lies between the step that was asked for last and this one."""
        before, self._step = self._step, step
        return bool(self._every_steps) and step // self._every_steps > before // self._every_steps


class NoNotary:
    """On every rank but the first."""

    def check(self, record: BatchRecord) -> None:
        pass

    def close_batch(self, record: BatchRecord) -> None:
        pass

    def end(self, weights: str) -> None:
        pass


class SavedAttempts:
    """Checkpoints of the run's progress, and what they still need of the journal.

    Args:
        journal: of the rank that removes from it; None on the others.
        reference: ``reference_identity``, which a checkpoint has to agree with.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        journal: Journal | None,
        reference: str | None,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._journal = journal
        self._reference = reference
        self._saved_step = -1  # in this attempt

    def resume(self, batches: PromptBatches) -> Progress:
        """Engine, cursor and random state as they were saved; without a checkpoint, the beginning.

        Collective. Raises ``ConfigError`` if the settings are not those of the checkpoint.
        """
        try:
            state = self._checkpoints.load_latest()
            if state is None:
                _refuse_complete_run(self._config.run.output_dir)
                logger.warning(
                    "%s holds no checkpoint: the run begins with its first batch, what the journal "
                    "has is not generated again",
                    self._checkpoints.directory,
                )
                return Progress(cursor=batches.state())
            if state["reference"] != self._reference:
                raise ValueError(
                    "the model at model.path, which is frozen, is not the one that the checkpoint "
                    "was trained with; restore it, or keep recipe.kl_coef and kl_in_reward_coef "
                    "as they were"
                )
            progress = Progress(**state["progress"])
            batches.restore(progress.cursor)
        except ValueError as error:  # other settings than those of the checkpoint
            raise ConfigError(f"--resume: {error}") from error
        return progress

    def save(self, progress: Progress) -> None:
        """Returns when the state is copied, it may still be being written. Collective."""
        state = {
            "progress": asdict(progress),
            "reference": self._reference,
            "journal": {"batch": progress.closed_batches},  # the first that it needs
        }
        self._checkpoints.save(progress.step, state)
        self._saved_step = progress.step

    def save_now(self, progress: Progress) -> None:
        """Returns when there is a checkpoint of ``progress``. Collective."""
        if self._saved_step != progress.step:
            self.save(progress)
        self._checkpoints.wait()

    def save_at_end(self, progress: Progress) -> None:
        """The run can be extended from its last step, if it writes checkpoints at all."""
        if self._config.checkpoint.every_steps:
            self.save_now(progress)

    def hook(self, progress: Progress) -> AfterReport:
        """Saves every ``checkpoint.every_steps`` steps, and lets go what is not needed any more."""
        due = Due(self._config.checkpoint.every_steps, progress.step)

        def save(step: int, _: PolicyVersion) -> None:
            if due.passes(step):
                self.save(progress)
                self._prune()

        return save

    def _prune(self) -> None:
        """Removes journalled batches that no checkpoint needs."""
        if self._journal is None or self._config.journal.keep == "all":
            return
        oldest = self._checkpoints.oldest_kept()
        if oldest is not None:
            self._journal.prune(int(oldest["journal"]["batch"]))


def _refuse_complete_run(output: Path) -> None:
    """Without a checkpoint, there is nothing that a complete run could be extended from."""
    file = output / CERTIFICATE_FILE
    lines = file.read_bytes().splitlines() if file.exists() else []
    if lines and b'"kind":"end"' in lines[-1]:
        raise ValueError(
            f"{output} is complete and has no checkpoint that it could be extended from; train "
            f"{output / 'model'} further in a new run, with checkpoint.every_steps set"
        )


def reference_identity(config: Config, agreement: Agreement) -> str | None:
    """Hash of the weight files of what is frozen and in no checkpoint, 64 hex digits. Collective.

    That is the reference, and the model under an adapter; both are ``model.path``. None without.
    """
    identity: str | None = None
    is_frozen = load_recipe(config).needs.reference or config.model.lora is not None
    if agreement.rank == 0 and is_frozen:
        digest = blake3()
        for file in sorted(config.model.path.iterdir()):
            if file.is_file() and file.suffix in WEIGHT_SUFFIXES:
                digest.update(f"{file.name}\0{file_blake3(file)}\n".encode())
        identity = digest.hexdigest()
    shared: str | None = agreement.from_rank_zero(identity)
    return shared


def open_notary(
    config: Config,
    output: Path,
    version: PolicyVersion,
    batches: PromptBatches,
    progress: Progress,
    agreement: Agreement,
    opened: ExitStack,
) -> Notary:
    """The certificate on rank 0, which says that a new attempt begins."""
    if agreement.rank != 0:
        return NoNotary()
    cursor = batches.state()
    run = RunRecord(
        run=version.run,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.data.epochs,
        num_prompts=int(cursor["num_prompts"]),
        batch_size=config.trainer.batch_size,
        updates_per_batch=config.trainer.updates_per_batch,
        data=str(cursor["dataset_hash"]),
    )
    attempt = AttemptRecord(
        attempt=version.attempt,
        num_ranks=agreement.num_ranks,
        first_batch=progress.closed_batches,
        reason="checkpoint" if progress.step else "start",
    )
    try:
        certificate = Certificate.open(output / CERTIFICATE_FILE, run, attempt)
    except CertificateError as error:
        raise ConfigError(f"--resume: {error}") from error
    opened.callback(certificate.close)
    return certificate
