"""Which prompts each batch has to have: seed, epoch and the dataset's size say it."""

from __future__ import annotations

import numpy as np

from easyrl.dataloaders.prompts.dataset import PromptBatches
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import CertifiedBatch
from easyrl.ledger.certificate.records import BatchRecord, RunRecord
from easyrl.schema import Key, Prompt


class DatasetOrder:
    """The prompts of a run, in the order in which they are trained."""

    def __init__(self, run: RunRecord | None) -> None:
        self._run = run
        self._batches: dict[int, PromptBatches] = {}  # by number of epochs

    def examine(self, record: BatchRecord, batch: CertifiedBatch) -> None:
        """The updates of ``record`` hold the batch's prompts, in their order.

        Raises ``CertificateError`` naming a prompt that is missing, another batch's or misplaced.
        """
        dispatched = [key for keys in record.updates for key in keys]
        expected = self._expected(batch)
        if dispatched == expected:
            return
        wanted, found = set(expected), set(dispatched)
        problems = (
            ("is missing, it belongs to this batch", (k for k in expected if k not in found)),
            ("does not belong to this batch", (k for k in dispatched if k not in wanted)),
            (
                "is out of the dataset's order in the updates",
                (key for key, want in zip(dispatched, expected, strict=False) if key != want),
            ),
        )
        for problem, keys in problems:
            for key in keys:
                raise CertificateError(problem, batch=record.batch, key=key)

    def _expected(self, batch: CertifiedBatch) -> list[Key]:
        batches = self._of(batch.epochs)
        batches.restore({**batches.state(), "position": batch.first_position})
        return [prompt.key for prompt in next(batches, [])]

    def _of(self, epochs: int) -> PromptBatches:
        """A resumed run may have been given more epochs: the short batch is at another place."""
        assert self._run is not None, "a batch without a run"
        if epochs not in self._batches:
            nothing = np.zeros(0, np.int32)
            self._batches[epochs] = PromptBatches(
                [Prompt(i, nothing, "", None) for i in range(self._run.num_prompts)],
                self._run.batch_size,
                seed=self._run.seed,
                shuffle=self._run.shuffle,
                epochs=epochs,
            )
        return self._batches[epochs]
