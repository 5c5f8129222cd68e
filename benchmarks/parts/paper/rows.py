"""Rows of the result: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = ("tpspd", "ratio", "paper_ratio", "bound")


@dataclass(frozen=True)
class Row:
    """One line of a table; what each ratio is of says the table (``tables.py``)."""

    name: str
    tpspd: float  # tokens trained per second per device
    ratio: float | None = None  # None: there is nothing to compare with
    paper_ratio: float | None = None
    bound: float | None = None  # of the ratio, from the same runs
    more: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        figures = {column: getattr(self, column) for column in COLUMNS} | dict(self.more)
        return {"name": self.name} | {key: rounded(value) for key, value in figures.items()}


def rounded(value: float | None) -> float | None:
    """To four digits."""
    return None if value is None else float(f"{value:.4g}")


def as_text(rows: Sequence[Row]) -> str:
    width = max(len(row.name) for row in rows)
    lines = ["  ".join([" " * width, *(f"{column:>11}" for column in COLUMNS)])]
    for row in rows:
        shown = row.as_json()
        cells = ["-" if shown[column] is None else f"{shown[column]:g}" for column in COLUMNS]
        more = "".join(f"  {name} {shown[name]:g}" for name in row.more)
        lines.append("  ".join([f"{row.name:<{width}}", *(f"{cell:>11}" for cell in cells)]) + more)
    return "\n".join(lines)
