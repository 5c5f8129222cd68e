"""``<directory>/step-N``: which checkpoints there are, and how one appears, is checked and goes.

A folder has its name only when everything in it is on disk. ``checkpoint.json`` is written last: it
names every other file with its size and blake3, and carries a hash of itself.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from easyrl.ledger.checkpoints.manifest import MANIFEST, write_manifest
from easyrl.ledger.checkpoints.state_file import file_blake3
from easyrl.runtime.durable_files import fsync_folder

UNFINISHED, REPLACED, REMOVED = ".tmp", ".old", ".gone"  # suffixes of what is no checkpoint

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The folder with all checkpoints of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending."""
        names = [p.name.removeprefix("step-") for p in self.directory.glob("step-*")]
        # an attempt that died between two renames left the earlier one aside
        return sorted(
            {int(n) for n in (name.removesuffix(REPLACED) for name in names) if _whole(n)}
        )

    def path(self, step: int) -> Path:
        """Of a finished checkpoint."""
        final = self.directory / f"step-{step}"
        aside = final.with_name(final.name + REPLACED)
        return aside if not final.exists() and aside.exists() else final

    def tidy(self) -> None:
        """Removes what earlier attempts left unfinished."""
        for aside in self.directory.glob(f"step-*{REPLACED}"):
            final = aside.with_name(aside.name.removesuffix(REPLACED))
            if not final.exists():
                aside.rename(final)
        for suffix in (UNFINISHED, REPLACED, REMOVED):
            for left in self.directory.glob(f"step-*{suffix}"):
                shutil.rmtree(left, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """An empty folder for the files of ``step``, under a temporary name."""
        unfinished = self.unfinished(step)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def unfinished(self, step: int) -> Path:
        """The name until ``finish``."""
        return self.directory / f"step-{step}{UNFINISHED}"

    def finish(self, step: int, record: dict[str, Any]) -> None:
        """Writes the manifest and gives the folder its name; it survives a power cut from then."""
        unfinished, final = self.unfinished(step), self.directory / f"step-{step}"
        write_manifest(unfinished / MANIFEST, record)
        fsync_folder(unfinished)
        aside = final.with_name(final.name + REPLACED)
        if final.exists():  # of an earlier attempt; there until the new one has its name
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        unfinished.rename(final)
        fsync_folder(self.directory)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Gives back the space of an unfinished checkpoint."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def prune(self, newest: int, keep: int) -> None:
        """Keeps the last ``keep`` up to ``newest``.

        Later ones are of an earlier attempt that this one, which could not use them, has left
        behind. One that cannot be removed stays; the log tells.
        """
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-keep:]
        for step in sorted(set(steps) - set(kept)):
            gone = self.directory / f"step-{step}{REMOVED}"
            shutil.rmtree(gone, ignore_errors=True)
            try:
                self.path(step).rename(gone)  # never half a checkpoint under its name
            except OSError as error:
                logger.warning("step %d is not to be kept and cannot be removed: %s", step, error)
            shutil.rmtree(gone, ignore_errors=True)


def state_files(folder: Path, record: dict[str, Any]) -> list[Path]:
    """The files with tensors, in rank order."""
    return [folder / name for name in sorted(record["files"])]


def problems_of(folder: Path, record: dict[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with the files ``names``; reads them whole."""
    found = []
    for name in names:
        file, expected = folder / name, record["files"][name]
        try:
            size = file.stat().st_size
            if size != expected["num_bytes"]:
                found.append(f"{file} has {size} of {expected['num_bytes']} bytes")
            elif file_blake3(file) != expected["blake3"]:
                found.append(f"{file} is not as it was written: its hash differs")
        except OSError as error:
            found.append(f"{file} cannot be read ({error.strerror})")
    return found


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
