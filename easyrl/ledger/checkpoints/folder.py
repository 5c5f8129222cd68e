"""``<directory>/step-N``: which checkpoints there are, and how one appears, is checked and goes.

A folder has its name only when everything in it is on disk. ``checkpoint.json``, the manifest, is
written last: it names every other file with its size and blake3, and carries a hash of itself.
Without torch: who only asks which checkpoints a run has need not wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from easyrl.ledger.format import FORMAT, other_format
from easyrl.runtime.durable_files import fsync, fsync_folder

MANIFEST = "checkpoint.json"
KEPT_FOR = "kept_for"  # in a manifest's state: why the checkpoint is not pruned
UNFINISHED, REPLACED, REMOVED = ".tmp", ".old", ".gone"  # suffixes of what is no checkpoint

logger = logging.getLogger(__name__)


class Damaged(ValueError):
    """A checkpoint cannot be used; the message names the file."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder with all checkpoints of a run."""

    directory: Path

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending."""
        names = [p.name.removeprefix("step-") for p in self.directory.glob("step-*")]
        # an attempt that died between two renames left the earlier one aside
        numbers = {name.removesuffix(REPLACED) for name in names}
        return sorted(int(n) for n in numbers if n.isascii() and n.isdigit())

    def path(self, step: int) -> Path:
        """Of a finished checkpoint."""
        final = self.directory / f"step-{step}"
        aside = final.with_name(final.name + REPLACED)
        return aside if not final.exists() and aside.exists() else final

    def readable(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """By step, folders and their manifests' records; without damaged ones."""
        for step in self.steps():
            folder = self.path(step)
            try:
                yield folder, read_manifest(folder)
            except Damaged:  # whoever resumes is told
                continue

    def begin(self, step: int) -> None:
        """An empty folder for ``step``, under a temporary name; what was left unfinished goes."""
        for aside in self.directory.glob(f"step-*{REPLACED}"):
            final = aside.with_name(aside.name.removesuffix(REPLACED))
            if not final.exists():
                aside.rename(final)
        for suffix in (UNFINISHED, REPLACED, REMOVED):
            for left in self.directory.glob(f"step-*{suffix}"):
                shutil.rmtree(left, ignore_errors=True)
        self.unfinished(step).mkdir(parents=True)

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
        """Keeps the last ``keep`` up to ``newest``, and those that say ``KEPT_FOR``.

        Later ones are of an earlier attempt that this one, which could not use them, has left
        behind. One that cannot be removed stays; the log tells.
        """
        steps = self.steps()
        earlier = [step for step in steps if step <= newest]
        kept = earlier[-keep:] + [step for step in earlier[:-keep] if self._is_kept(step)]
        for step in sorted(set(steps) - set(kept)):
            gone = self.directory / f"step-{step}{REMOVED}"
            try:
                self.path(step).rename(gone)  # never half a checkpoint under its name
            except OSError as error:
                logger.warning("step %d is not to be kept and cannot be removed: %s", step, error)
            shutil.rmtree(gone, ignore_errors=True)

    def _is_kept(self, step: int) -> bool:
        try:
            return KEPT_FOR in read_manifest(self.path(step))["state"]
        except Damaged:
            return False


def write_manifest(file: Path, record: dict[str, Any]) -> None:
    """Writes ``record`` with its own hash and fsyncs."""
    content = {"format": FORMAT, "blake3": _record_blake3(record), "record": record}
    with file.open("w") as opened:
        opened.write(json.dumps(content))
        opened.flush()
        fsync(opened.fileno(), file)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The record of a checkpoint. Raises ``Damaged`` naming the file."""
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        record, expected = content["record"], content["blake3"]
        found = content.get("format", 1)
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{file} cannot be read ({error})") from None
    if found != FORMAT:
        raise Damaged(f"{file} {other_format(found)}")
    if _record_blake3(record) != expected:
        raise Damaged(f"{file} is not as it was written: its hash differs")
    return record


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


def file_blake3(path: Path) -> str:
    """64 hex digits, of the whole file."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]


def _record_blake3(record: Any) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return blake3(canonical.encode()).hexdigest()
