"""A row for another trainer's run, from its log: ``--baseline verl:LOGFILE``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.parts.paper import trl_log, verl_log

READERS = {
    "verl": verl_log.tokens_per_s_per_device,
    "trl": trl_log.tokens_per_s_per_device,
}


class Baseline(NamedTuple):
    """A trainer that a user has measured, on devices of the user's own."""

    name: str
    tpspd: float


def read_baseline(text: str, devices: int | None) -> Baseline:
    """``TRAINER:LOGFILE``. Raises ``ValueError`` for what cannot be read, with the remedy."""
    trainer, colon, file = text.partition(":")
    if not colon or trainer not in READERS or not file:
        known = " or ".join(f"{name}:LOGFILE" for name in READERS)
        raise ValueError(f"--baseline {text}: is not of the form {known}; write one of these")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--baseline {text}: there is no file {path}; correct the path")
    return Baseline(trainer, READERS[trainer](path, devices))
