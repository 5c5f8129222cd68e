"""Starts the embedded server as a separate process and stops it again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

STOP_TIMEOUT_S = 15.0
READY_LINE = re.compile(r"(http://127\.0\.0\.1:\d+)\s")


class EmbeddedServerProcess:
    """``easyrl serve`` on a free loopback port; a context manager.

    Args:
        model: folder of the model.
        options: further command-line options of the server.
        cpus: processors the server may use; default: all.
        log: file that receives what it prints; default: a temporary one, shown when it fails.

    Raises ``RuntimeError`` with the end of the log if the server does not come up.
    """

    def __init__(
        self,
        model: Path,
        options: Sequence[str] = (),
        *,
        cpus: Sequence[int] | None = None,
        log: Path | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._log = log.open("w+b") if log is not None else tempfile.TemporaryFile()
        command = [sys.executable, "-m", "easyrl.inference_client.embedded_server", str(model)]
        command += ["--port", "0", *options]
        threads = {"OMP_NUM_THREADS": str(len(cpus))} if cpus else {}
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads},
            start_new_session=True,  # Ctrl-C is for the caller, who then stops the server
        )
        if cpus:
            pin_process(self.process.pid, cpus)
        try:
            self.url = self._wait_until_healthy(time.monotonic() + start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process, gently first. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_healthy(self, deadline: float) -> str:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the embedded server ended at once:\n{self._log_tail()}")
            if (ready := READY_LINE.search(self._log_text())) is not None:
                return ready[1]
            time.sleep(0.1)
        raise RuntimeError(f"the embedded server did not come up in time:\n{self._log_tail()}")

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _log_tail(self) -> str:
        return self._log_text()[-3000:]


def usable_cpus() -> list[int]:
    """Numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin_process(pid: int, cpus: Sequence[int]) -> None:
    """Restricts a process to ``cpus``, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cpus)
