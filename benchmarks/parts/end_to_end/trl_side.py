"""TRL's side as seen from here: its process, and which micro-batch it is given."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from benchmarks.parts.end_to_end.ours import THREADS, run_command
from benchmarks.parts.end_to_end.rows import Step
from benchmarks.parts.end_to_end.trl_request import TrlRequest, TrlRun
from benchmarks.parts.end_to_end.workloads import Workload


def require_trl() -> None:
    """Raises ``ValueError`` where it is not installed."""
    if find_spec("trl") is None:
        raise ValueError("TRL is not installed: pip install -c constraints.txt -e '.[bench]'")


def train(
    work: Workload,
    model: Path,
    prompts: Path,
    folder: Path,
    num_steps: int,
    num_threads: int,
    micro_batches: Sequence[int],
) -> dict[int, list[Step]]:
    """The steps of a run with each micro-batch, in one process. Raises ``RuntimeError``.

    Args:
        folder: receives what the process is told, prints and answers.
    """
    request = TrlRequest(
        model=str(model.absolute()),
        prompts=str(prompts.absolute()),
        reward=work.reward,
        batch_size=work.batch_size,
        num_generations=work.num_generations,
        max_tokens=work.max_tokens,
        min_tokens=work.min_tokens,
        learning_rate=work.learning_rate,
        kl_coef=work.kl_coef,
        num_threads=num_threads,
        micro_batches=list(micro_batches),
        num_steps=num_steps,
    )
    source, target = folder / "trl-request.json", folder / "trl-response.json"
    source.write_bytes(msgspec.json.encode(request))
    target.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, str(num_threads)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.parts.end_to_end.trl_run",
        str(source),
        str(target),
    ]
    run_command(command, folder / "trl.log", environment)
    runs = msgspec.json.decode(target.read_bytes(), type=list[TrlRun])
    return {run.micro_batch: run.steps for run in runs}


def tune(
    work: Workload, model: Path, prompts: Path, folder: Path, num_threads: int
) -> dict[int, list[Step]]:
    """A step with each of the workload's micro-batches; the first of them warms the process up."""
    sizes = work.micro_batches
    return train(work, model, prompts, folder, 1, num_threads, [sizes[0], *sizes])
