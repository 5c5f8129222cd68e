"""Ends the run when its launcher is gone.

On one node the ``deepspeed`` command does not pass SIGTERM on: it ends, and the processes that it
started go on without it. A scheduler that stops a job would leave the training running.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

LAUNCHER_MODULE = "deepspeed.launcher.launch"
INTERVAL_S = 0.5


def end_with_launcher(terminate: Callable[[str], object]) -> None:
    """Calls ``terminate`` with the reason when the ``deepspeed`` command that started us has ended.

    Does nothing in a process that the launcher did not start.
    """
    launcher = psutil.Process().parent()
    if launcher is None or LAUNCHER_MODULE not in launcher.cmdline():
        return
    watch = threading.Thread(
        target=_watch,
        args=(launcher, launcher.ppid(), terminate),
        name="easyrl-launcher-watch",
        daemon=True,
    )
    watch.start()


def _is_orphaned_to(command_pid: int) -> bool:
    """Whether it is what adopts orphans, and no ``deepspeed`` command of a container."""
    return command_pid == 1 and not any("deepspeed" in word for word in psutil.Process(1).cmdline())


def _watch(launcher: psutil.Process, command_pid: int, terminate: Callable[[str], object]) -> None:
    while not _is_orphaned_to(command_pid):  # it may have ended before this process looked
        try:
            if os.getppid() != launcher.pid or launcher.ppid() != command_pid:
                break
        except psutil.NoSuchProcess:
            break
        time.sleep(INTERVAL_S)
    terminate("the deepspeed command that started this run has ended")
