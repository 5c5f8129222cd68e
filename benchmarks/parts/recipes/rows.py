"""What was measured, a JSON line per run, so that an interrupted benchmark goes on."""

from __future__ import annotations

from typing import Literal

import msgspec

from benchmarks.parts.row_file import RowFile

Kind = Literal["start", "async", "sync", "shuffled"]  # start: the model before any training


class Key(msgspec.Struct, frozen=True):
    """Which run it was."""

    recipe: str  # "": of the start
    kind: Kind
    seed: int
    num_batches: int
    digest: str  # of the ready file
    revision: str  # the code's


class Measured(msgspec.Struct):
    """What came out of it.

    Attributes:
        accuracy: share of the held-out problems that the trained model answers right.
        seconds: of the whole run, its servers' start included, without the measurement.
        rewards: mean reward of each optimizer step.
    """

    accuracy: float
    seconds: float
    rewards: list[float]


class Row(msgspec.Struct):
    """A run and what came out of it."""

    key: Key
    measured: Measured


class Rows(RowFile[Key, Measured, Row]):
    """The rows of a file."""

    row = Row
