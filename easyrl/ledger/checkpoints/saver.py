"""Checkpoints of a run's progress: when they are due, what they need of the journal."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from easyrl.ledger.checkpoints.checkpoints import Checkpoints
from easyrl.ledger.journal import Journal
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.runtime.schedule import Due
from easyrl.schema import Progress

logger = logging.getLogger(__name__)


class Order(Protocol):
    """The order of the prompts, which has to be that of the checkpoint (``PromptOrder``)."""

    def cursor(self, position: int) -> dict[str, Any]: ...
    def position(self, cursor: dict[str, Any]) -> int: ...


class CheckpointSaver:
    """Saves and restores where a run is. All ranks call every method.

    Args:
        every_steps: between two checkpoints; 0: only where one is asked for.
        journal: of the rank that removes batches from it that no checkpoint needs; None: nothing is
            removed.
        reference: ``reference_identity``, which a checkpoint has to agree with.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        order: Order,
        *,
        every_steps: int,
        journal: Journal | None,
        reference: str | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._order = order
        self._every_steps = every_steps
        self._due = Due(every_steps, 0)
        self._journal = journal
        self._reference = reference
        self._saved_step = -1  # in this attempt

    def resume(self) -> Progress:
        """Engine and random state as they were saved; without a checkpoint, the beginning.

        Raises ``ValueError`` if the settings are not those of the checkpoint.
        """
        state = self._checkpoints.load_latest()
        output = self._checkpoints.directory.parent
        if state is None:
            _refuse_complete_run(output)
            logger.warning(
                "%s holds no checkpoint: the run begins with its first batch, what the journal "
                "has is not generated again",
                self._checkpoints.directory,
            )
            return Progress()
        if state["reference"] != self._reference:
            raise ValueError(
                "the model at model.path, which is frozen, is not the one that the checkpoint "
                "was trained with; restore it, or keep recipe.kl_coef and kl_in_reward_coef "
                "as they were"
            )
        self._order.position(state["cursor"])  # refuses another order
        progress = Progress(**state["progress"])
        self._due = Due(self._every_steps, progress.step)
        return progress

    def save(self, progress: Progress) -> None:
        """Returns when the state is copied, it may still be being written."""
        state = {
            "progress": asdict(progress),
            "cursor": self._order.cursor(progress.position),
            "reference": self._reference,
            "journal": {"batch": progress.closed_batches},  # the first that it needs
        }
        self._checkpoints.save(progress.step, state)
        self._saved_step = progress.step

    def save_now(self, progress: Progress) -> None:
        """Returns when there is a checkpoint of ``progress``."""
        if self._saved_step != progress.step:
            self.save(progress)
        self._checkpoints.wait()

    def save_if_due(self, progress: Progress) -> None:
        """Every ``every_steps`` steps; lets go what is not needed any more."""
        if self._due.passes(progress.step):
            self.save(progress)
            self._prune()

    def save_at_end(self, progress: Progress) -> None:
        """The run can be extended from its last step, if it writes checkpoints at all."""
        if self._every_steps:
            self.save_now(progress)

    def _prune(self) -> None:
        """Removes journalled batches that no checkpoint needs."""
        if self._journal is None:
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
