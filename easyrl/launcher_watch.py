"""Ends the run when its launcher is gone.

On one node the ``deepspeed`` command does not pass SIGTERM on: it ends, and the processes that it
started go on without it. A scheduler that stops a job would leave the training running.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

LAUNCHER_MODULE = "deepspeed.launcher.launch"
INTERVAL_S = 0.5


def end_with_launcher() -> None:
    """Sends this process SIGTERM when the ``deepspeed`` command that started it has ended.

    Does nothing in a process that the launcher did not start.
    """
    launcher = psutil.Process().parent()
    if launcher is None or LAUNCHER_MODULE not in launcher.cmdline():
        return
    watch = threading.Thread(
        target=_watch, args=(launcher, launcher.ppid()), name="easyrl-launcher-watch", daemon=True
    )
    watch.start()


def _watch(launcher: psutil.Process, command_pid: int) -> None:
    while True:
        try:
            if os.getppid() != launcher.pid or launcher.ppid() != command_pid:
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
