"""Ends a server's processes when the process that started them is gone, however it ended.

A server forks processes of its own (vLLM's engine cores and workers), which a kill of the server,
or of the trainer above it, would leave behind. So each server runs in a session of its own, and a
helper process that does nothing but watch its parent kills that whole session.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

KILL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.5
# Python's helper that unlinks shared memory and semaphores (/dev/shm) when their owners are gone.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
TRACKER_PATIENCE_S = 5.0  # on a busy machine it may not even have started yet


class ProcessGuard:
    """Watches over one session on behalf of this process.

    Made before the session exists, so that nothing is started unguarded; told of it by ``watch``.
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
        self._pipe.write(f"{session}\n".encode())
        self._pipe.flush()

    def release(self) -> None:
        """Ends the watch; what is left of the session is killed first. Safe to call twice."""
        self._pipe.close()
        self._helper.wait()


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
    """What the helper process runs: reads the session's number, ends it when ``parent`` is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it to all below the parent
    received = b""
    # Both, since a process that the parent forked may hold its end of the pipe open.
    while os.getppid() == parent:
        if select.select([0], [], [], POLL_INTERVAL_S)[0]:
            if not (data := os.read(0, 4096)):
                break
            received += data
    for session in received.split():
        kill_session(int(session))


if __name__ == "__main__":
    main(int(sys.argv[1]))
