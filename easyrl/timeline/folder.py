"""The folder of the timeline: a gzip file per batch and rank, whole or not there.

A file takes its name when all of it is written; that of a batch that is trained again replaces the
one before. A damaged one is left out, with a warning: nothing depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from easyrl.runtime.whole_files import UNFINISHED, read_compressed, write_compressed
from easyrl.timeline.spans import BatchSpans

FOLDER = "timeline"  # in the run's
_NAME = re.compile(r"batch-(\d+)-rank(\d+)\.json\.gz")


class BatchFile(NamedTuple):
    """A file's name, taken apart."""

    batch: int
    rank: int
    path: Path


class TimelineFolder:
    """Written by the ranks of a run, each its own files; read by anybody at any time."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FOLDER

    def write(self, spans: BatchSpans) -> None:
        """A rank's batch, in place of what there was. Raises ``OSError``."""
        self.path.mkdir(exist_ok=True)
        write_compressed(self._file(spans.batch, spans.rank), msgspec.json.encode(spans))

    def remove(self, batch: int, rank: int) -> None:
        """One file, if it is there. Raises ``OSError``."""
        self._file(batch, rank).unlink(missing_ok=True)

    def remove_up_to(self, batch: int, rank: int) -> None:
        """The rank's files of ``batch`` and those before it. Raises ``OSError``."""
        for file in self.files() if batch >= 0 else ():
            if file.batch <= batch and file.rank == rank:
                file.path.unlink(missing_ok=True)

    def remove_from(self, batch: int, rank: int) -> None:
        """The rank's files of ``batch`` and later ones, and what a killed attempt was writing.

        Raises ``OSError``.
        """
        for file in self.files():
            if file.batch >= batch and file.rank == rank:
                file.path.unlink(missing_ok=True)
        for path in self.path.glob(f"batch-*-rank{rank}.json.gz{UNFINISHED}"):
            path.unlink(missing_ok=True)

    def batches(self) -> list[int]:
        """That spans are kept of, in order."""
        return sorted({file.batch for file in self.files()})

    def read(self, batch: int) -> list[BatchSpans]:
        """What each rank has kept of ``batch``, by rank."""
        found = [
            read_compressed(file.path, _decode) for file in self.files() if file.batch == batch
        ]
        return sorted((spans for spans in found if spans is not None), key=lambda each: each.rank)

    def files(self) -> Iterator[BatchFile]:
        """All that are there, in the order of their names."""
        if self.path.is_dir():
            for name in sorted(os.listdir(self.path)):
                if found := _NAME.fullmatch(name):
                    batch, rank = map(int, found.groups())
                    yield BatchFile(batch, rank, self.path / name)

    def _file(self, batch: int, rank: int) -> Path:
        return self.path / f"batch-{batch:08d}-rank{rank}.json.gz"


def _decode(content: bytes) -> BatchSpans:
    return msgspec.json.decode(content, type=BatchSpans)
