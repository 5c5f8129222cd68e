"""The demo's servers, processes of their own: the embedded one, or real vLLM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess, VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess

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


def start_server(
    engine: Engine, model: Path, cpus: Sequence[int], api_key: str, log: Path
) -> ServerProcess:
    """A server of ``model`` on a free loopback port, restricted to the processors ``cpus``.

    Raises ``ValueError`` if vLLM's environment is not fit for it, ``ServerStartError`` if the
    server does not come up.
    """
    options = ["--max-model-len", str(MAX_MODEL_LEN)]
    if engine == "vllm":
        return VllmServerProcess(model, vllm_python(), options, cpus=cpus, api_key=api_key, log=log)
    options += ["--num-threads", str(len(cpus))]
    return EmbeddedServerProcess(model, options, cpus=cpus, api_key=api_key, log=log)
