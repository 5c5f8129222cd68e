"""What was measured, a JSON line per run, so that an interrupted benchmark goes on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec


class Step(msgspec.Struct):
    """An optimizer step with all that belongs to it."""

    seconds: float
    spans: dict[str, float]  # seconds, a side's own names
    reward: float  # mean over the batch
    response_tokens: float  # mean over the batch


class Key(msgspec.Struct, frozen=True):
    """Which run it was."""

    workload: str
    side: str
    pair: int
    num_steps: int  # that count
    settings: str = ""  # what else decides its time: our command line, TRL's micro-batch


class Row(msgspec.Struct):
    """One run of one side: the steps that count."""

    key: Key
    steps: list[Step]

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

    def get(self, key: Key, measure: Callable[[], Sequence[Step]]) -> Row:
        """The row of ``key``; measured and written down if the file has none."""
        if key not in self._rows:
            row = Row(key, list(measure()))
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
            self._rows[key] = row
        return self._rows[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._rows


def _decoded(line: bytes) -> Row | None:
    """None: its end was lost."""
    try:
        return msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError:
        return None
