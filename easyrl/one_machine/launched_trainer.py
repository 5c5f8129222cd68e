"""The ``deepspeed`` launcher and the training processes below it, ended as one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from easyrl.runtime.machine import free_port, usable_cpus
from easyrl.runtime.process_guard import ProcessGuard, kill_session, session_members

POLL_S = 0.1
RANK_OPTION = "--local_rank"  # of the processes that the launcher starts; it is one of two itself


class LaunchedTrainer:
    """``easyrl.train`` in several processes, in a session that ends with this process.

    A context manager: what is left at its end is stopped, and killed after ``grace_s``.

    Args:
        arguments: of ``easyrl.train``.
        num_processes: without ``devices``, on the processors.
        devices: indices of GPUs or NPUs, a process each.
        environment: further variables.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        num_processes: int,
        *,
        grace_s: float,
        devices: Sequence[int] = (),
        environment: Mapping[str, str],
    ) -> None:
        self._grace_s = grace_s
        folder = Path(sys.executable).parent
        listed = ",".join(map(str, devices))
        where = ["--include", f"localhost:{listed}"] if devices else []
        where = where or ["--num_accelerators", str(num_processes)]
        command = [
            *(sys.executable, str(folder / "deepspeed"), "--quiet", *where),
            *("--master_port", str(free_port()), "--module", "easyrl.train", *arguments),
        ]
        variables = {
            **os.environ,
            **({} if devices else {"DS_ACCELERATOR": "cpu"}),
            **environment,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        if num_processes > 1 and not devices:  # threads that spin would stand in each other's way
            threads = max(1, len(usable_cpus()) // num_processes)
            variables["OMP_NUM_THREADS"] = str(threads)
        self._guard = ProcessGuard()
        try:
            self.process = subprocess.Popen(command, env=variables, start_new_session=True)
        except BaseException:
            self._guard.release()
            raise
        self._guard.watch(self.process.pid)

    def wait(self) -> int:
        """The launcher's exit status, when all its processes have ended."""
        status = self.process.wait()
        self._wait_for_the_last()
        return status

    def interrupt(self) -> None:
        """Ctrl-C: all end at once, without a checkpoint."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(word.startswith(RANK_OPTION) for word in process.cmdline()):
                    process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """SIGTERM: training saves and ends. Its processes see that the launcher is gone."""
        self.process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
            self.process.wait()
        self._wait_for_the_last()
        kill_session(self.process.pid)
        self._guard.release()

    def _wait_for_the_last(self) -> None:
        deadline_s = time.monotonic() + self._grace_s
        while session_members(self.process.pid) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
