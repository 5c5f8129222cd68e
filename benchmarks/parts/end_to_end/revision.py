"""Which code is measured."""

from __future__ import annotations

import hashlib
import subprocess

from benchmarks.parts.worktree import ROOT


def revision() -> str:
    """The commit, and a digest of what differs from it; raises ``ValueError`` without git."""
    commit = _git("rev-parse", "--short=12", "HEAD").decode().strip()
    changes = _git("diff", "HEAD")
    return commit if not changes else f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}"


def _git(*arguments: str) -> bytes:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            "rows are kept by commit, and git does not name one; measure in a checkout"
        ) from error
