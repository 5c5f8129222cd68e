"""Which prompt each position of a batch has to have: seed, epoch and the dataset's size say it."""

from __future__ import annotations

import numpy as np

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import CertifiedBatch
from easyrl.ledger.certificate.records import BatchRecord, RunRecord
from easyrl.schema import Key, Prompt


class DatasetOrder:
    """The prompts of a run, in the order in which they are drawn."""

    def __init__(self, run: RunRecord | None) -> None:
        self._run = run
        self._order: PromptOrder | None = None

    def examine(self, record: BatchRecord, batch: CertifiedBatch) -> None:
        """The groups of ``record`` are those of the order's next prompts, each at its position.

        Raises ``CertificateError`` naming a prompt that is missing, another batch's or misplaced.
        """
        found = [group.key for group in record.groups]
        expected = [
            self._key(position)
            for position in range(batch.first_position, batch.first_position + record.num_drawn)
        ]
        if found == expected:
            return
        is_wanted, is_found = set(expected), set(found)
        problems = (
            ("is missing, it belongs to this batch", (k for k in expected if k not in is_found)),
            ("does not belong to this batch", (k for k in found if k not in is_wanted)),
            (
                "is out of the dataset's order",
                (key for key, want in zip(found, expected, strict=False) if key != want),
            ),
        )
        for problem, keys in problems:
            for key in keys:
                raise CertificateError(problem, batch=record.batch, key=key)

    def _key(self, position: int) -> Key:
        assert self._run is not None, "a batch without a run"
        if self._order is None:
            nothing = np.zeros(0, np.int32)
            self._order = PromptOrder(
                [Prompt(i, nothing, "", None) for i in range(self._run.num_prompts)],
                seed=self._run.seed,
                shuffle=self._run.shuffle,
                epochs=None,
            )
        return self._order.prompt(position).key
