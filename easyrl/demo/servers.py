"""The demo's servers, processes of their own: the embedded one, or real vLLM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess, VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.runtime.machine import usable_cpus
from easyrl.runtime.shared_cores import SUPPORTED, VARIABLE, shared_file

Engine = Literal["embedded", "vllm"]

VLLM_PYTHON = "EASYRL_VLLM_PYTHON"  # environment variable
SERVER_KEY = "EASYRL_DEMO_KEY"  # environment variable: what the demo's servers ask for
MAX_MODEL_LEN = 128  # the longest problem and its longest answer take half of it


def vllm_python() -> Path:
    """Interpreter of vLLM's environment. Raises ``ValueError`` if none is named, or it is none."""
    named = os.environ.get(VLLM_PYTHON)
    if not named:
        raise ValueError(
            f"--engine vllm: the environment variable {VLLM_PYTHON} is not set; export the "
            "interpreter of the environment that vLLM is installed in, for instance "
            f"{VLLM_PYTHON}=.venv-vllm/bin/python"
        )
    if shutil.which(named) is None:
        raise ValueError(f"{VLLM_PYTHON}: {named} is not an executable; name a Python interpreter")
    return Path(named)


@dataclass(frozen=True)
class Cores:
    """How trainer and servers divide this machine's processors."""

    of_trainer: Sequence[int] | None = None  # that each is restricted to; None: none
    of_servers: Sequence[int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # of the trainer, embedded servers


@contextmanager
def divided_cores(engine: Engine, run_dir: Path) -> Iterator[Cores]:
    """Embedded servers and the trainer lend each other theirs; vLLM has half of them, pinned."""
    cpus = usable_cpus()
    if engine == "vllm" or not SUPPORTED:
        of_trainer, of_servers = cpus[: len(cpus) // 2] or cpus, cpus[len(cpus) // 2 :]
        threads = {"OMP_NUM_THREADS": str(len(of_trainer))}
        yield Cores(of_trainer, of_servers, threads)
        return
    with shared_file(run_dir) as file:
        yield Cores(environment={VARIABLE: str(file)})


def start_server(
    engine: Engine, model: Path, cores: Cores, api_key: str, log: Path
) -> ServerProcess:
    """A server of ``model`` on a free loopback port.

    Raises ``ValueError`` if vLLM's environment is not fit for it, ``ServerStartError`` if the
    server does not come up.
    """
    options = ["--max-model-len", str(MAX_MODEL_LEN)]
    cpus = cores.of_servers
    if engine == "vllm":
        return VllmServerProcess(model, vllm_python(), options, cpus=cpus, api_key=api_key, log=log)
    return EmbeddedServerProcess(
        model, options, cpus=cpus, env=cores.environment, api_key=api_key, log=log
    )
