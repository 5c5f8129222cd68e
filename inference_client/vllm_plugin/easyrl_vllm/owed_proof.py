"""A proof that is owed: weights came on their trainer's promise to have their bits proved.

What is promised for may have come unchecked (``receiving.py``). So from the first such chunk on the
server generates nothing, until that trainer, or another, says that the proof was right, or until a
whole update has come without the promise. Kept by the embedded server, and in vLLM's engine core
(``core_guard.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REFUSAL = "the weights came without a check, and nobody has said yet that their proof was right"


class OwedProof:
    """Whether a server owes a proof of what it was given.

    Attributes:
        is_owed: nothing may be generated.
    """

    def __init__(self) -> None:
        self.is_owed = False
        self._is_promised = False  # for a chunk of the update that is open
        self._asked: set[str] = set()  # nonces of proofs of what owes one

    def begin(self) -> None:
        """An update was opened; what was proved before says nothing of it."""
        self._is_promised = False
        self._asked.clear()

    def take(self, chunks: Sequence[Mapping[str, Any]]) -> None:
        """``chunks`` are about to be loaded, all of them or, after an error, some."""
        if has_promise(chunks):
            self.is_owed = self._is_promised = True

    def finish(self) -> None:
        """All of the update has come; nothing is left of what was there before."""
        self.is_owed = self._is_promised

    def answered(self, nonce: str) -> None:
        """All that is served was shown, hashed with ``nonce``; only its asker knows if it is right.

        Not to be told of a question without tensors.
        """
        if self.is_owed:
            self._asked.add(nonce)

    def accept(self, nonce: str) -> None:
        """The answer to ``nonce`` was right.

        Raises ``ValueError`` if a proof is owed and it was none of what is served now.
        """
        if self.is_owed and nonce not in self._asked:
            raise ValueError("this proof was of other weights than those that are served now")
        self.is_owed = False
        self._asked.clear()


def has_promise(chunks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a proof is to follow for one of ``chunks`` (``Chunk.describe``)."""
    return any(chunk.get("proof_follows") is True for chunk in chunks)
