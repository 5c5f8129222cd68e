"""What a run keeps between its attempts, checkpoints and journal, and where it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.build.data import TrainingData
from easyrl.build.ledger import reference_identity
from easyrl.build.model import LoadedModel
from easyrl.build.run import OpenRun
from easyrl.completion_check import limits_of
from easyrl.config import ConfigError
from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.engines.base import TrainEngine
from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.journal.batch import Journal, group_settings
from easyrl.ledger.ledger import resume as resume_progress
from easyrl.recipes.loading import load_recipe
from easyrl.schema import Progress


@dataclass(frozen=True)
class KeptState:
    """The model is as it was when ``progress`` was made."""

    checkpoints: Checkpoints
    journal: Journal
    reference: str | None  # ``reference_identity``
    progress: Progress


def open_kept_state(run: OpenRun, data: TrainingData, model: LoadedModel) -> KeptState:
    """Loads the checkpoint that a resumed run goes on from; writes nothing. Collective.

    Raises ``ConfigError`` if its settings were others.
    """
    config = run.config
    checkpoints = open_checkpoints(run, model.engine)
    journal = Journal(
        run.output / "journal",
        run.version.attempt,
        run.ranks.dp_rank,
        config.journal.fsync,
        settings=group_settings(config, rejects=load_recipe(config).rejects),
        # what a context left of max_tokens then is not known any more
        limits=limits_of(config.rollout, data.vocabulary, told_length=False),
        record=run.record,
    )
    reference = reference_identity(config, run.collectives)
    progress = resumed_progress(run, checkpoints, data.order, reference, model.resume_at_most)
    return KeptState(checkpoints, journal, reference, progress)


def open_checkpoints(run: OpenRun, engine: TrainEngine) -> Checkpoints:
    """Those of the run's folder; a run that ends well waits for its last one."""
    return run.opened.enter_context(
        Checkpoints(
            run.output / "checkpoints",
            run.config.checkpoint.keep,
            engine,
            run.collectives,
            run.config.checkpoint.background,
            record=run.record,
        )
    )


def resumed_progress(
    run: OpenRun,
    checkpoints: Checkpoints,
    order: PromptOrder,
    reference: str | None,
    at_most: int | None,
) -> Progress:
    """The beginning, or where the checkpoint was that a resumed run has loaded. Collective.

    ``reference``: ``reference_identity``; ``at_most``: a checkpoint of that step or earlier. Raises
    ``ConfigError`` if its settings were others.
    """
    if not run.resume:
        return Progress()
    try:
        return resume_progress(checkpoints, order, reference, at_most)
    except ValueError as error:  # other settings than those of the checkpoint
        raise ConfigError(f"--resume: {error}") from error
