"""The ledger of a run: its certificate, its checkpoints."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3

from easyrl.build.steps import max_draws, num_epochs
from easyrl.config import Config, ConfigError
from easyrl.config.secrets import redact
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, RunRecord
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.checkpoints.export import WEIGHT_SUFFIXES
from easyrl.ledger.checkpoints.folder import file_blake3
from easyrl.recipes.loading import load_recipe
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.schema import PolicyVersion, Progress


def reference_identity(config: Config, collectives: Collectives) -> str | None:
    """Hash of the weight files of what is frozen and in no checkpoint, 64 hex digits. Collective.

    That is the reference, and the model under an adapter; both are ``model.path``. None without.
    """
    identity: str | None = None
    is_frozen = load_recipe(config).needs.reference or config.model.lora is not None
    if collectives.ranks.rank == 0 and is_frozen:
        digest = blake3()
        for file in sorted(config.model.path.iterdir()):
            if file.is_file() and file.suffix in WEIGHT_SUFFIXES:
                digest.update(f"{file.name}\0{file_blake3(file)}\n".encode())
        identity = digest.hexdigest()
    shared: str | None = collectives.broadcast(identity)
    return shared


def recipe_digest(config: Config) -> str:
    """Of the recipe's name, keys and own file: what its decisions depend on. 32 hex digits."""
    section = config.recipe
    # without secrets: verify has only what the run has written
    text = json.dumps(redact(section.model_dump(mode="json", exclude={"file"})), sort_keys=True)
    own = b"" if section.file is None else section.file.read_bytes()
    return blake3(text.encode() + b"\n" + own).hexdigest(length=16)


def open_certificate(
    config: Config,
    output: Path,
    version: PolicyVersion,
    order: PromptOrder,
    progress: Progress,
    collectives: Collectives,
    opened: ExitStack,
) -> Certificate | None:
    """The certificate on the first rank, which says that a new attempt begins."""
    if collectives.ranks.rank != 0:
        return None
    cursor = order.cursor(progress.position)
    run = RunRecord(
        run=version.run,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        num_prompts=int(cursor["num_prompts"]),
        batch_size=config.trainer.batch_size,
        data=str(cursor["dataset_hash"]),
    )
    attempt = AttemptRecord(
        attempt=version.attempt,
        num_ranks=collectives.ranks.world_size,
        first_batch=progress.closed_batches,
        reason="checkpoint" if progress.step else "start",
        epochs=num_epochs(config),
        updates_per_batch=config.trainer.updates_per_batch,
        max_draws=max_draws(config),
        recipe=recipe_digest(config),
    )
    try:
        certificate = Certificate(output / CERTIFICATE_FILE, run, attempt)
    except CertificateError as error:
        raise ConfigError(f"--resume: {error}") from error
    opened.callback(certificate.close)
    return certificate
