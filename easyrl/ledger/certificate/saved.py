"""What a run's checkpoints say: how far it has come, and what of its journal has to be there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from easyrl.ledger.checkpoints.manifest import MANIFEST, Damaged, read_manifest

CHECKPOINT_FOLDER = "checkpoints"
CONFIG_FILES = "config*.yaml"  # the newest attempt's, and each attempt's
_STEP = re.compile(r"step-(\d+)(\.old)?")  # .old: put aside while its successor takes its name


class SavedCheckpoint(NamedTuple):
    """A finished checkpoint."""

    step: int
    closed_batches: int
    first_batch: int  # the oldest that it needs of the journal
    file: str  # its manifest, below the run's folder


class Needed(NamedTuple):
    """The journal has to have the batches from ``first`` on."""

    first: int
    because: str


class _Progress(msgspec.Struct):
    closed_batches: int


class _Journal(msgspec.Struct):
    batch: int


class _State(msgspec.Struct):
    step: int
    progress: _Progress
    journal: _Journal


class _JournalSettings(msgspec.Struct):
    keep: str = "resumable"


class _Settings(msgspec.Struct):
    journal: _JournalSettings = msgspec.field(default_factory=_JournalSettings)


def saved_checkpoints(run_dir: Path) -> list[SavedCheckpoint]:
    """By step. Damaged ones are left out, as a resumed run does, and those that vanish now."""
    found = []
    for folder in (run_dir / CHECKPOINT_FOLDER).glob("step-*"):
        state = _state(folder) if _STEP.fullmatch(folder.name) else None
        if state is not None:
            file = f"{CHECKPOINT_FOLDER}/{folder.name}/{MANIFEST}"
            found.append(
                SavedCheckpoint(
                    state.step, state.progress.closed_batches, state.journal.batch, file
                )
            )
    return sorted(found)


def needed_journal(run_dir: Path) -> Needed:
    """Only batches before the oldest checkpoint are ever removed, if any may be.

    Raises ``ValueError`` if the configuration cannot be read.
    """
    if _keeps_all(run_dir):
        return Needed(0, "with journal.keep=all none is ever removed")
    saved = saved_checkpoints(run_dir)
    if not saved:
        return Needed(0, "none is removed unless a checkpoint follows it, and there is none")
    oldest = saved[0]
    return Needed(oldest.first_batch, f"{oldest.file} goes on from batch {oldest.first_batch}")


def _state(folder: Path) -> _State | None:
    """What is needed of a manifest; None if it is not there or not as it was written."""
    try:
        record = read_manifest(folder)
        return msgspec.convert({"step": record["step"], **record["state"]}, _State)
    except (Damaged, KeyError, TypeError, msgspec.MsgspecError):
        return None


def _keeps_all(run_dir: Path) -> bool:
    """In all of its attempts: what one has removed stays removed."""
    kept = []
    for file in run_dir.glob(CONFIG_FILES):
        try:
            settings = msgspec.yaml.decode(file.read_bytes(), type=_Settings)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file}: is no configuration: {error}") from error
        kept.append(settings.journal.keep)
    return set(kept) == {"all"}
