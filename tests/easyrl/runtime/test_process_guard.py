"""Processes that have inherited a mark are found, whatever they are just doing."""

from __future__ import annotations

import os
import subprocess

import psutil

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
