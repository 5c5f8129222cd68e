"""The ledger of a run: its certificate, its checkpoints."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from pathlib import Path

from blake3 import blake3

from easyrl.build.recipe_digest import recipe_digest
from easyrl.build.run import OpenRun
from easyrl.build.steps import has_more_batches, max_draws, num_epochs
from easyrl.config import Config, ConfigError
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.chain import chain_hash, refuse_other_seal
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, RunRecord
from easyrl.ledger.certificate.seal import SealKey, read_seal_key
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.export import WEIGHT_SUFFIXES, is_newer
from easyrl.ledger.checkpoints.folder import CheckpointFolder, file_blake3
from easyrl.ledger.earlier_run import EarlierRun
from easyrl.metrics.logprob_agreement import agreement_limit
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Collectives, on_rank_zero
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.runtime.run_folder import keep_attempt
from easyrl.runtime.streams import tolerant
from easyrl.schema import Progress, RunComplete

logger = logging.getLogger(__name__)


def reference_identity(config: Config, collectives: Collectives) -> str | None:
    """Hash of the weight files of what is frozen and in no checkpoint, 64 hex digits. Collective.

    That is the reference, and the model under an adapter; both are ``model.path``; a teacher, and
    the model under a critic's adapter. None without.
    """
    identity: str | None = None
    needs = load_recipe(config).needs
    folders = [config.model.path] if needs.reference or config.model.lora is not None else []
    if needs.teacher is not None:
        folders.append(needs.teacher.path)
    if needs.critic and config.model.lora is not None and config.critic.path is not None:
        folders.append(config.critic.path)
    if collectives.ranks.rank == 0 and folders:
        digest = blake3()
        for file in itertools.chain(*(sorted(folder.iterdir()) for folder in folders)):
            if file.is_file() and file.suffix in WEIGHT_SUFFIXES:
                digest.update(f"{file.name}\0{file_blake3(file)}\n".encode())
        identity = digest.hexdigest()
    shared: str | None = collectives.broadcast(identity)
    return shared


def open_earlier_run(run: OpenRun, order: PromptOrder) -> EarlierRun | None:
    """On the first rank, what ``--resume`` goes on with; changes nothing. Collective.

    Raises ``ConfigError`` on every rank if it cannot go on with these settings, ``RunComplete`` if
    they leave it nothing to do.
    """
    earlier: EarlierRun | None = None

    def open_it() -> str | None:
        nonlocal earlier
        try:
            earlier = EarlierRun(run.output, _run_record(run, order))
        except CertificateError as error:
            raise ConfigError(f"--resume: {error}") from error
        return _completion(run.config, run.output, order, earlier)

    completion: str | None = on_rank_zero(run.collectives, open_it)
    if completion is not None:
        raise RunComplete(completion)
    return earlier


def last_certified_step(
    earlier: EarlierRun | None, checkpoints: Path, collectives: Collectives
) -> int | None:
    """The step whose checkpoint, or an earlier one, is to be resumed from; None: any. Collective.

    A certificate that has lost its end certifies less than the newest checkpoint has trained. That
    is trained again, under new lines, where there is a checkpoint to do so from.
    """
    limit: int | None = None
    if earlier is not None:
        steps = CheckpointFolder(checkpoints).steps()
        certified = earlier.num_steps
        if steps and steps[0] <= certified < steps[-1]:
            limit = certified
            logger.warning(
                "%s certifies %d steps, the newest checkpoint has %d: it has lost its end; the "
                "steps behind the last certified checkpoint are trained again",
                checkpoints.with_name(CERTIFICATE_FILE),
                certified,
                steps[-1],
            )
    shared: int | None = collectives.broadcast(limit)
    return shared


def _completion(
    config: Config, output: Path, order: PromptOrder, earlier: EarlierRun
) -> str | None:
    """That the run is finished, and how to go on; None if anything is left to do."""
    step, position = earlier.num_steps, earlier.position
    if not earlier.is_complete or has_more_batches(config, order, step=step, position=position):
        return None
    last_export = output / ("model" if config.model.lora is None else "adapter")
    if load_recipe(config).needs.critic:
        last_export = output / "critic"
    if config.checkpoint.export_at_end and not is_newer(last_export, output / CERTIFICATE_FILE):
        return None  # it was killed behind its last line
    where = f", its model is {output / 'model'}" if config.checkpoint.export_at_end else ""
    key, now = "trainer.max_steps", config.trainer.max_steps
    if now is None:
        key, now = "data.epochs", config.data.epochs
    further = f"raise {key} (it is {now}) and add --resume (resume=True)"
    if not CheckpointFolder(output / "checkpoints").steps():
        further = "begin a new run with it: this one has no checkpoint (checkpoint.every_steps=0)"
    return f"{output} is finished after {step} steps{where}; to train it further, {further}"


def load_seal_key(file: Path | None, output: Path, *, resume: bool) -> SealKey | None:
    """The key that lines of the certificate are sealed with, on the first rank.

    Raises ``ConfigError`` if it cannot be used, or if the run was begun with or without one.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        return None
    try:
        key = None if file is None else read_seal_key(file, output)
        if resume:
            refuse_other_seal(output / CERTIFICATE_FILE, with_key=key is not None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return key


def print_chain(output: Path) -> None:
    """The certificate's last hash, for whoever keeps the log (``easyrl verify --chain``)."""
    file = output / CERTIFICATE_FILE
    last = chain_hash(file)
    with tolerant(sys.stdout):
        print(f"certificate {last} {file}", flush=True)


def open_certificate(
    run: OpenRun,
    order: PromptOrder,
    progress: Progress,
    earlier: EarlierRun | None,
    seal_key: SealKey | None,
) -> Certificate | None:
    """The certificate on the first rank, which says that a new attempt begins. Collective.

    The first that writes into the folder of an ``earlier`` run, with the attempt's number. Raises
    ``ConfigError`` on every rank if the attempt has no place there; then nothing is written.
    """
    config = run.config
    on_rollouts = config.source == "rollouts"
    attempt = AttemptRecord(
        attempt=run.version.attempt,
        num_ranks=run.ranks.dp_size,
        first_batch=progress.closed_batches,
        reason="checkpoint" if progress.step else "start",
        epochs=num_epochs(config),
        updates_per_batch=config.trainer.updates_per_batch,
        max_draws=max_draws(config) if on_rollouts else None,
        recipe=recipe_digest(config),
        agreement_limit=agreement_limit(config) if on_rollouts else None,
    )
    certificate: Certificate | None = None

    def open_it() -> None:
        nonlocal certificate
        try:
            if earlier is not None:
                earlier.refuse(attempt)
            keep_attempt(run.version, run.output)
            certificate = Certificate(
                run.output / CERTIFICATE_FILE, _run_record(run, order), attempt, seal_key
            )
        except CertificateError as error:
            raise ConfigError(f"--resume: {error}") from error
        run.opened.callback(certificate.close)

    on_rank_zero(run.collectives, open_it)
    return certificate


def _run_record(run: OpenRun, order: PromptOrder) -> RunRecord:
    config, cursor = run.config, order.cursor(0)
    return RunRecord(
        run=run.version.run,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        num_prompts=int(cursor["num_prompts"]),
        batch_size=config.trainer.batch_size,
        data=str(cursor["dataset_hash"]),
        source=config.source,
    )
