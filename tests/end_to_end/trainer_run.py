"""A training run as a process of its own, as users start it: the command line, once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from easyrl.metrics.event_log import read_events
from easyrl.metrics.names import declared
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.machine import free_port

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "benchmarks/overlap.yaml"


def trainer_command(
    run_dir: Path,
    model: Path,
    prompts: Path,
    urls: Sequence[str],
    *options: str,
    num_ranks: int = 0,
) -> list[str]:
    """The command of a run named after its folder; ``num_ranks`` 0: without the launcher.

    ``options`` come last and win.
    """
    start = [sys.executable, "-m", "easyrl.train"]
    if num_ranks:
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        start = [sys.executable, launcher, "--num_accelerators", str(num_ranks)]
        start += ["--master_port", str(free_port()), "--module", "easyrl.train"]
    return [
        *start,
        CONFIG,
        f"run.output_dir={run_dir}",
        f"run.name={run_dir.name}",
        f"model.path={model}",
        f"data.files=[{prompts}]",
        "data.max_prompt_tokens=16",
        f"inference.endpoints=[{','.join(urls)}]",
        *options,
    ]


def trainer_environment(**further: str) -> dict[str, str]:
    """One thread, on the CPU, with this environment's commands first."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **further,
    }


def start_trainer(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Starts ``command`` in a session of its own; what it prints goes behind ``log``'s end."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=trainer_environment(**environment),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_ranks(command: Sequence[str], log: Path, num_ranks: int) -> list[subprocess.Popen[bytes]]:
    """``command`` once per rank, without the launcher, which has an exit status of its own."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks)}
    return [
        start_trainer(command, log, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(num_ranks)
    ]


def run_to_end(
    command: Sequence[str], timeout_s: float = 240.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``command``, whatever its end is; all that it printed is in ``stdout``."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=trainer_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def run_trainer(command: Sequence[str], timeout_s: float = 240.0) -> str:
    """Runs ``command`` to its end, which must be a good one, and returns what it printed.

    Whatever the run writes of metrics has to be in the reference.
    """
    result = run_to_end(command, timeout_s)
    assert result.returncode == 0, result.stdout[-3000:]
    folders = [o.removeprefix("run.output_dir=") for o in command if o.startswith("run.output_dir")]
    file = Path(folders[-1]) / "metrics.jsonl" if folders else None
    for step in read_metrics(file) if file is not None and file.is_file() else ():
        assert [name for name in step if name != "step" and declared(name) is None] == []
    return result.stdout


def event_names(run_dir: Path) -> list[str]:
    """Names of the events that rank 0 has recorded so far."""
    path = run_dir / "events-rank0.jsonl"
    return [event["event"] for event in read_events(path)] if path.exists() else []
