"""Processes are found and ended, whatever they and their guard are just doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from easyrl.runtime import process_guard
from easyrl.runtime.process_guard import kill_marked, marked_processes

MARK = "EASYRL_CHILD_of_this_test"


def test_one_that_is_being_executed_is_found(monkeypatch):
    """It shows no environment at the first look."""
    looks: list[int] = []
    environ = psutil.Process.environ

    def shown(self: psutil.Process) -> dict[str, str]:
        if self.pid == child.pid:
            looks.append(self.pid)
            if len(looks) == 1:
                return {}
        return environ(self)

    with subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: "1"}) as child:
        monkeypatch.setattr(psutil.Process, "environ", shown)
        assert marked_processes(MARK) == [child.pid]
        assert len(looks) == 2
        looks.clear()
        kill_marked(MARK)
        assert child.wait(5) != 0
    assert marked_processes(MARK) == []


def test_what_a_parent_has_told_that_was_gone_too_early_is_ended():
    """Killed before its helper was ready; what it forked holds its end of the pipe open."""
    told, tells = os.pipe()
    helper = [sys.executable, "-I", process_guard.__file__, "0"]  # the parent is none of ours
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        try:
            os.write(tells, f"{child.pid}\n".encode())
            assert subprocess.run(helper, stdin=told, timeout=20).returncode == 0
            assert child.wait(5) == -signal.SIGKILL
        finally:
            child.kill()
            os.close(told)
            os.close(tells)
