"""The temporary folder of a command that starts processes, and how the command ends."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import cast


@dataclass
class Scratch:
    """Where a command's runs are; the folder stays behind if ``keep`` is set by the end."""

    folder: Path
    keep: bool


@contextmanager
def scratch(name: str, *, keep: bool) -> Iterator[Scratch]:
    """A new folder, removed with the block or named on stderr; lines are printed as they come.

    SIGTERM unwinds the block, so that servers and trainer end too.
    """
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made = Scratch(Path(tempfile.mkdtemp(prefix=f"easyrl-{name}-")), keep)
    try:
        yield made
    finally:
        if made.keep:
            print(f"kept: {made.folder}", file=sys.stderr)
        else:
            shutil.rmtree(made.folder)
