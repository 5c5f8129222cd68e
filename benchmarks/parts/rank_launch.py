"""A script in several CPU processes that ``deepspeed`` launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.worktree import ROOT
from easyrl.runtime.machine import free_port

TIMEOUT_S = 900


def run_on_ranks(script: Path, arguments: Sequence[str], num_ranks: int, log: Path) -> bool:
    """A thread per process; what they say goes to ``log``. Whether all have ended well."""
    launcher = [str(Path(sys.executable).with_name("deepspeed"))]
    launcher += ["--num_accelerators", str(num_ranks), "--master_port", str(free_port())]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with log.open("w") as output:
        finished = subprocess.run(
            [*launcher, str(script), *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    return finished.returncode == 0
