"""What was measured, a JSON line per run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace


class Step(msgspec.Struct):
    """An optimizer step with all that belongs to it."""

    seconds: float
    spans: dict[str, float]  # seconds, a side's own names
    reward: float  # mean over the batch
    response_tokens: float  # mean over the batch


class Measured(msgspec.Struct):
    """A run's steps that count."""

    steps: list[Step]
    heldout: float | None = None  # of the trained model, ``heldout.heldout_logprob``


class Key(msgspec.Struct, frozen=True):
    """Which run it was."""

    workload: str
    side: str
    pair: int
    num_steps: int  # that count
    settings: str = ""  # what else decides its time: our command line, TRL's micro-batch
    revision: str = ""  # of this repository


class Row(msgspec.Struct):
    """One run of one side."""

    key: Key
    measured: Measured

    @property
    def steps(self) -> list[Step]:
        return self.measured.steps

    @property
    def step_s(self) -> float:
        """Median over its steps."""
        return statistics.median(step.seconds for step in self.steps)

    @property
    def spans(self) -> dict[str, float]:
        """Medians over its steps."""
        return {
            name: statistics.median(step.spans[name] for step in self.steps)
            for name in self.steps[0].spans
        }


class Rows:
    """The rows of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        self._rows = {row.key: row for row in map(_decoded, lines) if row is not None}

    def get(
        self, key: Key, measure: Callable[[], Measured], *, of_any_revision: bool = False
    ) -> Row:
        """The row of ``key``; measured and written down if the file has none.

        ``of_any_revision``: failing that, the newest one of another.
        """
        found = self.find(key, of_any_revision=of_any_revision)
        if found is None:
            found = Row(key, measure())
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
            self._rows[key] = found
        return found

    def find(self, key: Key, *, of_any_revision: bool = False) -> Row | None:
        """As ``get``; None if there is none."""
        found = self._rows.get(key)
        if found is None and of_any_revision:
            of_others = [
                row
                for other, row in self._rows.items()
                if replace(other, revision=key.revision) == key
            ]
            found = of_others[-1] if of_others else None
        return found


def _decoded(line: bytes) -> Row | None:
    """None: its end was lost, or it is of an earlier form of this benchmark."""
    try:
        return msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError:
        return None
