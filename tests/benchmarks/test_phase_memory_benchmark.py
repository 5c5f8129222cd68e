"""The benchmark of memory by phase, small."""

from __future__ import annotations

import json

import pytest

from benchmarks import phase_memory


def test_the_last_line_has_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["phase_memory", "--seconds", "0.05", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    phase_memory.main()
    *rows, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert len(rows) == 2 and figures["phases_per_s"] == 100
    assert 0 < figures["end_us"] < 5000
    assert -1 < figures["lowest"] <= figures["slowdown"] <= figures["highest"]
