"""Libraries of environments, installed apart: ``make test-verifiers``.

Elsewhere they are missing, and those tests are skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

VARIABLE = "EASYRL_TEST_VERIFIERS"  # the folder they are installed in
EXAMPLES = Path(__file__).parents[3] / "examples/verifiers"  # environments written for it


def folder_with(package: str) -> Path:
    """That folder. Skips where there is none; fails if it has no such package."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{package} is not installed: run make test-verifiers")
    folder = Path(os.environ[VARIABLE])
    assert (folder / package).is_dir(), f"{folder} has no {package}"
    return folder


def python_with(folder: Path, where: Path, *more: Path) -> Path:
    """An interpreter, written to ``where``, that imports from these folders and nothing of ours."""
    script = where / "python"
    paths = ":".join(map(str, (folder, EXAMPLES, *more)))
    # -S: without the packages of the trainer's environment
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script
