"""A run as users start it: servers of their own, the trainer through the ``deepspeed`` launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from easyrl.demo.servers import vllm_python
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess, VllmServerProcess
from easyrl.inference_client.servers.managed.server_process import ServerProcess
from easyrl.runtime.machine import free_port

Engine = Literal["embedded", "vllm"]


def start_servers(
    engine: Engine,
    model: Path,
    count: int,
    folder: Path,
    opened: ExitStack,
    options: Sequence[str] = (),
) -> list[ServerProcess]:
    """``count`` servers of ``model`` at once, a thread each, on ports that stay.

    Returns when all answer. ``folder`` receives their logs, ``opened`` ends them.
    """
    one_thread = {"OMP_NUM_THREADS": "1"}
    servers: list[ServerProcess] = []
    for number in range(count):
        log, port = folder / f"server-{number}.log", free_port()
        server: ServerProcess
        if engine == "vllm":
            quiet = [*options, "--disable-uvicorn-access-log"]
            server = VllmServerProcess(
                model, vllm_python(), quiet, port=port, log=log, env=one_thread, wait=False
            )
        else:
            threads = [*options, "--num-threads", "1"]
            server = EmbeddedServerProcess(model, threads, port=port, log=log, wait=False)
        servers.append(opened.enter_context(server))
    for server in servers:
        server.wait_until_healthy()
    return servers


def start_trainer(
    config: str,
    overrides: Sequence[str],
    log: Path,
    *,
    num_ranks: int = 1,
    folder: Path | None = None,
    **environment: str,
) -> subprocess.Popen[bytes]:
    """The launcher's process, in a session of its own; what is printed goes behind ``log``'s end.

    A thread per rank, on the CPU. ``num_ranks`` 0: one rank without the launcher, so that the exit
    status is the trainer's own. ``folder``: where it is started, default this one.
    """
    bin_folder = Path(sys.executable).parent
    launcher = [
        *(sys.executable, str(bin_folder / "deepspeed"), "--quiet"),
        *("--num_accelerators", str(num_ranks), "--master_port", str(free_port()), "--module"),
    ]
    start = launcher if num_ranks else [sys.executable, "-m"]
    command = [*start, "easyrl.train", config, *overrides]
    everything = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        **environment,
    }
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=everything, stdout=file, stderr=file, start_new_session=True, cwd=folder
        )
