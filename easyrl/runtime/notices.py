"""What a rank tells all others without a collective, which a busy or stuck rank would not join."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


class Notices:
    """A board that every rank reads; one notice of each kind, the last one written.

    When rank 0, which keeps it, has ended nothing is told any more, and nothing raised.
    """

    def __init__(self, store: Store | None, rank: int) -> None:
        self.rank = rank
        self._store = store  # None: nobody else is there

    @property
    def has_readers(self) -> bool:
        return self._store is not None

    def post(self, kind: str, text: str) -> None:
        """From any thread."""
        try:
            if self._store is not None:
                self._store.set(kind, f"rank {self.rank}: {text}")
        except RuntimeError as error:
            self._lose(error)

    def read(self, kind: str) -> str | None:
        """The notice, with the rank that wrote it, or None; does not wait."""
        try:
            if self._store is not None and self._store.check([kind]):
                return self._store.get(kind).decode()
        except RuntimeError as error:
            self._lose(error)
        return None

    def _lose(self, error: RuntimeError) -> None:
        logger.debug("rank 0 keeps no notices any more: %s", error)
        self._store = None
