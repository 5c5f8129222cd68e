"""Ends processes when the process that started them is gone, however it ended.

What a trainer starts starts more: vLLM its engine cores and workers, a user's reward whatever it
likes. A kill of the trainer would leave these behind. So a helper process that does nothing but
watch its parent kills them: all of a session (a server's), or all that have inherited a *mark*, a
variable of their environment, in whatever session (those of workers).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.5
EXECUTED_S = 0.02  # that a process which is being executed may show no environment
# Python's helper that unlinks shared memory and semaphores (/dev/shm) when their owners are gone.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
TRACKER_PATIENCE_S = 5.0  # on a busy machine it may not even have started yet


class ProcessGuard:
    """Watches over sessions and marks on behalf of this process.

    Made before the processes exist, so that nothing is started unguarded.
    """

    def __init__(self) -> None:
        self._helper = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve()), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the caller's group must not reach it
        )
        assert self._helper.stdin is not None
        self._pipe = self._helper.stdin

    def watch(self, session: int) -> None:
        """From now on ``session`` ends with this process."""
        self._tell(str(session))

    def watch_marked(self, mark: str) -> None:
        """From now on all that have ``mark``, which is no number, end with this process."""
        self._tell(mark)

    def release(self) -> None:
        """Ends the watch; what is left is killed first. Safe to call twice."""
        self._pipe.close()
        self._helper.wait()

    def _tell(self, line: str) -> None:
        self._pipe.write(f"{line}\n".encode())
        self._pipe.flush()


def marked_processes(mark: str) -> list[int]:
    """Running processes with the variable ``mark`` in their environment; zombies have none.

    One that is being executed shows no environment for a moment: those without are asked twice.
    """
    found, without = _having(mark, psutil.pids())
    if without:
        time.sleep(EXECUTED_S)
        found += _having(mark, without)[0]
    return found


def _having(mark: str, pids: Iterable[int]) -> tuple[list[int], list[int]]:
    """Of ``pids`` those with ``mark``, and those that show no environment."""
    found, without = [], []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            environment = psutil.Process(pid).environ()
            if mark in environment:
                found.append(pid)
            elif not environment:
                without.append(pid)
    return found, without


def kill_marked(mark: str) -> None:
    """Kills all that have ``mark``; one that the kernel does not let go is left behind."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while (pids := marked_processes(mark)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def kill_session(session: int) -> None:
    """Kills every process of ``session`` (that of the leader's id) and waits until none runs.

    Resource trackers get a moment to end by themselves, else shared memory would be left. Raises
    ``RuntimeError`` if some cannot be killed.
    """
    start = time.monotonic()
    while members := session_members(session):
        elapsed_s = time.monotonic() - start
        if elapsed_s > KILL_TIMEOUT_S:
            raise RuntimeError(f"processes {members} of server {session} cannot be killed")
        for pid in members:
            spared = elapsed_s < TRACKER_PATIENCE_S and _is_resource_tracker(pid)
            try:
                # a tracker that was stopped with the others has to go on to end
                os.kill(pid, signal.SIGCONT if spared else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def session_members(session: int) -> list[int]:
    """Running processes of a session; zombies are not."""
    return [pid for pid in psutil.pids() if _is_member(pid, session)]


def _is_member(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False


def _is_resource_tracker(pid: int) -> bool:
    try:
        return any(RESOURCE_TRACKER in part for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def main(parent: int) -> None:
    """What the helper process runs: reads sessions and marks, ends them when ``parent`` is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it to all below the parent
    received = b""
    while True:
        # Both, since a process that the parent forked may hold its end of the pipe open. What the
        # parent has told is read also where it was gone before this process was ready.
        is_gone = os.getppid() != parent
        if select.select([0], [], [], 0 if is_gone else POLL_INTERVAL_S)[0]:
            if not (data := os.read(0, 4096)):
                break
            received += data
        elif is_gone:
            break
    for watched in received.decode().split():
        if watched.isdecimal():
            kill_session(int(watched))
        else:
            kill_marked(watched)


if __name__ == "__main__":
    main(int(sys.argv[1]))
