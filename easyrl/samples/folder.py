"""The folder of samples: a gzip file per optimizer step and rank, whole or not there.

A file takes its name when all of it is written, so that a killed run leaves no half of one, and the
file of a step that is trained again replaces the one before. Only a power cut can damage one: it
is left out, with a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from easyrl.runtime.whole_files import UNFINISHED, read_compressed, write_compressed
from easyrl.samples.records import SampledGroup, decode, encode

FOLDER = "samples"  # in the run's
_NAME = re.compile(r"step-(\d+)-rank(\d+)of(\d+)\.jsonl\.gz")


class StepFile(NamedTuple):
    """A file's name, taken apart."""

    step: int
    rank: int
    num_ranks: int
    path: Path


class SampleFolder:
    """Written by the ranks of a run, each its own files; read by anybody at any time."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FOLDER

    def write(self, step: int, rank: int, num_ranks: int, groups: Sequence[SampledGroup]) -> None:
        """What rank ``rank`` keeps of ``step``, in place of what there was. Raises ``OSError``."""
        self.path.mkdir(exist_ok=True)
        file = self.path / f"step-{step:08d}-rank{rank}of{num_ranks}.jsonl.gz"
        write_compressed(file, encode(groups))

    def remove_up_to(self, step: int) -> None:
        """The files of ``step`` and the steps before it. Raises ``OSError``."""
        for file in self.files() if step > 0 else ():
            if file.step <= step:
                file.path.unlink(missing_ok=True)

    def remove_after(self, step: int) -> None:
        """The files of later steps, and what a killed attempt was writing. Raises ``OSError``."""
        for file in self.files():
            if file.step > step:
                file.path.unlink(missing_ok=True)
        for path in self.path.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """That samples are kept of, in order."""
        return sorted({file.step for file in self.files()})

    def is_whole(self, step: int) -> bool:
        """Whether every rank has written what it keeps of ``step``."""
        files = [file for file in self.files() if file.step == step]
        return bool(files) and len(files) >= files[0].num_ranks

    def read(self, step: int) -> list[SampledGroup]:
        """The kept groups of ``step``, of all ranks, in the order of their prompts."""
        groups = []
        for file in self.files():
            if file.step == step:
                groups += read_compressed(file.path, decode) or []
        return sorted(groups, key=lambda group: group.position)

    def files(self) -> Iterator[StepFile]:
        """All that are there, in the order of their names."""
        if self.path.is_dir():
            for name in sorted(os.listdir(self.path)):
                if found := _NAME.fullmatch(name):
                    step, rank, num_ranks = map(int, found.groups())
                    yield StepFile(step, rank, num_ranks, self.path / name)
