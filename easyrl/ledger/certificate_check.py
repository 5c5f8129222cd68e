"""What ``easyrl verify`` reads from any certificate, and holds to the rules of its kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from easyrl.dataloaders.prompts.dataset import PromptOrder
from easyrl.ledger.certificate.chain import START
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import RunRecord
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.traces import Traces
from easyrl.runtime.run_files import CERTIFICATE_FILE
from easyrl.schema import Key, Prompt


@dataclass
class CertificateVerdict:
    """What was found in a certificate; the counts go as far as the checks came."""

    violation: CertificateError | None = None
    batches: int = 0  # in the weights
    trained: int = 0  # groups, or records
    skipped: int = 0  # of them, those of skipped optimizer steps
    attempts: int = 0
    superseded: int = 0  # lines of batches that a later attempt trained again
    torn: bool = False  # the last line was cut off
    sealed: bool = False
    seals_checked: bool = False
    lines: int = 0
    chain: str = START  # hash of the last line
    published: int | None = None  # the line whose hash was given
    ended: bool = False

    @property
    def seal_told(self) -> str:
        """What guards the certificate against being written anew."""
        told = "sealed, checked with --seal KEYFILE" if self.sealed else "not sealed"
        if self.sealed and self.seals_checked:
            told = "seals checked"
        if self.published is None:
            return f"{told}, compare the hash with the published one: --chain HASH"
        return f"{told}, line {self.published} of {self.lines} has the published hash"


def examine_certificate(
    run_dir: Path, verdict: CertificateVerdict, key: SealKey | None, chain: str | None
) -> History:
    """All lines, held to the chain and to what else the folder tells; noted in ``verdict``.

    ``key``: of the seals. ``chain``: a published hash, which one of the lines has to have. Raises
    ``CertificateError`` for what is wrong.
    """
    traces = Traces.read(run_dir)  # first: a run that goes on meanwhile only ever adds to them
    history = History(run_dir / CERTIFICATE_FILE, key)
    history.take_all()
    verdict.lines, verdict.chain = history.last.number, history.last.hash
    verdict.sealed, verdict.seals_checked = bool(history.sealed), key is not None
    if chain is not None:
        verdict.published = _published_line(history, chain)
    verdict.torn, verdict.ended = history.torn, history.end is not None
    verdict.attempts, verdict.superseded = len(history.attempts), history.num_superseded
    traces.examine(history)
    return history


def _published_line(history: History, chain: str) -> int:
    """The line with the hash ``chain``. Raises ``CertificateError`` if none has it."""
    number = history.hashes.get(chain)
    if number is None:
        raise CertificateError(
            f"no line has the published hash {chain}: the certificate is another one, or was "
            "written anew"
        )
    return number


def order_of(run: RunRecord) -> PromptOrder:
    """Which prompt is where: seed, epoch and the dataset's size say it."""
    nothing = np.zeros(0, np.int32)
    prompts = [Prompt(index, nothing, "", None) for index in range(run.num_prompts)]
    return PromptOrder(prompts, seed=run.seed, shuffle=run.shuffle, epochs=None)


def refuse_other_prompts(order: PromptOrder, first: int, found: Sequence[Key]) -> None:
    """What was ``found``, nothing twice, has to be the order's prompts from ``first`` on.

    Raises ``CertificateError`` naming a prompt that is missing or not at its position.
    """
    wanted = [order.prompt(first + place).key for place in range(len(found))]
    is_found = set(found)
    for key in wanted:
        if key not in is_found:
            raise CertificateError("is missing, it belongs to this batch", key=key)
    for key, want in zip(found, wanted, strict=True):
        if key != want:
            raise CertificateError("is out of the dataset's order", key=key)


def number(count: int, one: str, many: str | None = None) -> str:
    """``count`` with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"
