"""Checkouts of other revisions of this repository, for benchmarks that compare with them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE = "0561e01"  # before the work on speed from end to end: what its benchmarks compare with


def imported_first(checkout: Path) -> dict[str, str]:
    """The environment in which processes, started in ``checkout``, import its code."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(checkout), inherited)))
    return {**os.environ, "PYTHONPATH": path}


class NoCheckout(Exception):  # noqa: N818 (said to the user as it is)
    """Git cannot check a revision out."""


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """A checkout of ``revision`` in ``folder``, gone with the block. Raises ``NoCheckout``."""
    git = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run(
        [*git, "add", "--quiet", "--detach", str(folder), revision], capture_output=True, text=True
    )
    if added.returncode:
        raise NoCheckout(f"no checkout of {revision}: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)
