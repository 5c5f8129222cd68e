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
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["phases_per_s"] == 100
    assert 0 < figures["end_us"] < 5000
    lower, upper = figures["quartiles"]
    assert -1 < lower <= figures["slowdown"] <= upper
    assert 0 < figures["sampling"] < 0.5
