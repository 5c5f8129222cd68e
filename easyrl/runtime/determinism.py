"""``run.determinism: strict``: the same seed and configuration give the same bits.

Every rank computes in a fixed order (here), each response depends on its prompt and its seed alone
(``build/invariant_endpoints.py``), micro-batches are cut by prompt order alone (``GroupStream``),
and ranks have fixed shares of the prompts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from easyrl.config import Config, ConfigError
from easyrl.runtime.durable_files import write_durably
from easyrl.runtime.numerics import arithmetic

logger = logging.getLogger(__name__)

ARITHMETIC_FILE = "arithmetic.txt"
WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS; with any other its sums vary from run to run
# What depends on the clock, on how many servers there are, or on where an attempt was cut off.
IRREPRODUCIBLE = (
    "sync/endpoints",
    "sync/broadcast",
    "batch/groups_recovered",
    "batch/look_ahead_tokens",
)
IRREPRODUCIBLE_PREFIXES = ("time/", "throughput/", "memory/", "environment/")


def is_strict(config: Config) -> bool:
    return config.run.determinism == "strict"


def make_deterministic(config: Config) -> None:
    """Has this process compute the same bits each time. To be called before anything is computed.

    On a CPU the threads are those of ``OMP_NUM_THREADS``, one if it is not set: their number
    decides the order of sums. Does nothing unless the run is strict. Raises ``ConfigError`` naming
    an environment variable that forbids it; torch raises ``RuntimeError`` later, naming an
    operation that has no deterministic form.
    """
    if not is_strict(config):
        return
    import torch
    from deepspeed.accelerator import get_accelerator

    threads = _checked_environment()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    # what finds bugs takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(threads)


def _checked_environment() -> int:
    """The number of threads on a CPU."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise ConfigError(
            f"run.determinism: strict needs CUBLAS_WORKSPACE_CONFIG={WORKSPACES[0]}, the "
            f"environment sets {workspace}; unset it"
        )
    if os.environ.get("OMP_DYNAMIC", "false").lower() in ("true", "1"):
        raise ConfigError(
            "run.determinism: strict needs a fixed number of threads, the environment sets "
            f"OMP_DYNAMIC={os.environ['OMP_DYNAMIC']}; unset it"
        )
    wanted = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]  # a list is for nested regions
    if not wanted.isdecimal() or int(wanted) == 0:
        raise ConfigError(
            f"run.determinism: OMP_NUM_THREADS is {wanted!r}, which is no number of threads; "
            "correct or unset it"
        )
    return int(wanted)


def remember_arithmetic(config: Config, output: Path) -> None:
    """Warns where an attempt of the run computes otherwise than the first one did; rank 0 only."""
    if not is_strict(config):
        return
    mine = arithmetic()
    if (first := remembered(output / ARITHMETIC_FILE, mine)) != mine:
        logger.warning(
            "run.determinism: this attempt computes with %s, the first one did with %s; the last "
            "bits of what follows are not those of a run that was never interrupted",
            mine,
            first,
        )


def remembered(file: Path, now: str) -> str:
    """What ``file`` says; where it is not there yet it is made to say ``now``."""
    if file.exists():
        return file.read_text().strip()
    write_durably(file, now + "\n")
    return now


def reproducible(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that are the same to the bit in every strict run of a configuration."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in IRREPRODUCIBLE
        and not name.startswith(IRREPRODUCIBLE_PREFIXES)
        and not name.endswith("_s")
    }
