"""Starts trainers one after another in one process and says what each changed in its folder.

``python -m tests.end_to_end.refused_runs RUN_DIR COMMANDS``, the latter a JSON list of argument
lists of ``easyrl train``; prints a JSON list of ``[status, what it said, changed files]``.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

from easyrl.runtime.run_files import LOCK_FILE


def digests(folder: Path) -> dict[str, str]:
    """Of all files below ``folder``; the lock's content names its last holder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != LOCK_FILE
    }


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) != after.get(name))


def main(folder: Path, commands: list[list[str]]) -> None:
    from easyrl.train import main as train

    results = []
    for command in commands:
        before, said = digests(folder), io.StringIO()
        with redirect_stderr(said):
            status = train(command)
        results.append([status, said.getvalue(), changed(before, digests(folder))])
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
