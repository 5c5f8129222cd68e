"""Which code is measured."""

from __future__ import annotations

import hashlib
import subprocess

from benchmarks.parts.worktree import ROOT

# what no second of a run depends on, so that rows measured before a word was changed go on counting
UNMEASURED = ("docs", "README.md", "tests", ".ci")
MEASURED = (".", *(f":(exclude){path}" for path in UNMEASURED))


def revision() -> str:
    """The newest commit that changed what is measured, and a digest of what differs from it.

    Raises ``ValueError`` without git.
    """
    commit = _git("log", "-1", "--abbrev=12", "--format=%h", "--", *MEASURED).decode().strip()
    changes = _git("diff", "HEAD", "--", *MEASURED)
    return commit if not changes else f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}"


def _git(*arguments: str) -> bytes:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            "rows are kept by commit, and git does not name one; measure in a checkout"
        ) from error
