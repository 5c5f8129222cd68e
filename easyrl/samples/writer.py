"""Writes the samples of each closed batch: what the training loop is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from easyrl.metrics.batch_metrics import Update
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import sampled_group

logger = logging.getLogger(__name__)


@dataclass
class SampleWriter:
    """A rank's: it writes those of its groups that were chosen of all ranks' together.

    A run does not depend on them: where they cannot be written it goes on, and says so once.
    """

    folder: SampleFolder
    keep: int  # steps
    rank: int = 0  # data-parallel
    num_ranks: int = 1
    _told: bool = field(default=False, init=False)

    def close_batch(self, step: int, updates: Sequence[Update]) -> dict[str, float]:
        """Those of a batch that counts, whose first optimizer step is ``step``; what it cost."""
        start = time.perf_counter()
        try:
            for number, update in enumerate(updates):
                self._write(step + number, update)
            if self.rank == 0:
                self.folder.remove_up_to(step + len(updates) - 1 - self.keep)
        except OSError as error:
            if not self._told:
                logger.warning(
                    "%s: samples cannot be written (%s); the run goes on without them",
                    self.folder.path,
                    error.strerror,
                )
            self._told = True
        choosing = sum(update.totals.samples.seconds for update in updates)
        return {"time/samples_s": choosing + time.perf_counter() - start}

    def _write(self, step: int, update: Update) -> None:
        chosen = update.totals.samples
        groups = [
            sampled_group(step, trained, chosen.why[key], chosen.compared, skipped=update.skipped)
            for key, trained in chosen.groups.items()
        ]
        groups.sort(key=lambda group: group.position)
        self.folder.write(step, self.rank, self.num_ranks, groups)
