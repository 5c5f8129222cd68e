"""What was measured, a JSON line per run, so that an interrupted benchmark goes on."""

from __future__ import annotations

from typing import Literal

import msgspec

from benchmarks.parts.row_file import RowFile

# start: the model before any training; teacher: of the distillation
Kind = Literal["start", "teacher", "async", "sync", "shuffled"]


class Key(msgspec.Struct, frozen=True):
    """Which run it was."""

    recipe: str  # "": of the start and of the teacher
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
        rewards: mean reward of each batch.
        explained_variance: the critic's, the best mean over five consecutive batches; None without
            a critic, or of fewer batches.
        clip_fraction: share of a batch's tokens at which a bound of the policy's ratio acts, the
            largest of all batches; None for a recipe without such a bound.
    """

    accuracy: float
    seconds: float
    rewards: list[float]
    explained_variance: float | None = None
    clip_fraction: float | None = None


class Row(msgspec.Struct):
    """A run and what came out of it."""

    key: Key
    measured: Measured


class Rows(RowFile[Key, Measured, Row]):
    """The rows of a file."""

    row = Row
