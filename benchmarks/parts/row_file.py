"""A file of measured runs, a JSON line each, so that an interrupted benchmark goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace


def rows_file(out: Path, kept: Path, *, resume: bool) -> Path:
    """Where rows go, in ``out``: with those that are gone on with, and no others.

    ``kept``: rows of the repository, which another machine begins with.
    """
    rows = out / "rows.jsonl"
    if not resume and rows.exists():
        rows.rename(out / f"rows-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    if resume and not rows.exists() and kept.exists():
        shutil.copyfile(kept, rows)
    return rows


class RowKey(Protocol):
    """Which run it was; a frozen struct."""

    @property
    def revision(self) -> str:
        """Of the code that was measured."""


K = TypeVar("K", bound=RowKey)
M = TypeVar("M")
R = TypeVar("R")


class RowFile(Generic[K, M, R]):
    """Rows by their keys; ``row`` is their struct of the fields ``key`` and ``measured``.

    Args:
        of_any_revision: where a row is missing, the newest one of another revision counts.
    """

    row: ClassVar[Any]

    def __init__(self, path: Path, *, of_any_revision: bool = False) -> None:
        self._path = path
        self._of_any_revision = of_any_revision
        lines = path.read_bytes().splitlines() if path.exists() else []
        self._rows: dict[K, R] = {row.key: row for row in map(self._decoded, lines) if row}

    def get(self, key: K, measure: Callable[[], M], *, of_any_revision: bool = False) -> R:
        """The row of ``key``; measured and written down if the file has none."""
        found = self.find(key, of_any_revision=of_any_revision)
        if found is None:
            found = self.row(key, measure())
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
            self._rows[key] = found
        return found

    def find(self, key: K, *, of_any_revision: bool = False) -> R | None:
        """As ``get``; None if there is none."""
        found = self._rows.get(key)
        if found is None and (of_any_revision or self._of_any_revision):
            of_others = [
                row
                for other, row in self._rows.items()
                if replace(other, revision=key.revision) == key
            ]
            found = of_others[-1] if of_others else None
        return found

    def _decoded(self, line: bytes) -> Any:
        """None: its end was lost, or it is of an earlier form of the benchmark."""
        try:
            return msgspec.json.decode(line, type=self.row)
        except msgspec.DecodeError:
            return None
