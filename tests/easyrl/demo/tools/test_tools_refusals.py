"""The demo with a tool refuses what it could not measure, before anything is built or removed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from easyrl.demo import __main__ as command
from easyrl.demo.tools import run as demo

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("scoring.shuffle_rewards=true", "scoring.shuffle_rewards=true: the demo sets this key"),
        ("inference.endpoints=[http://127.0.0.1:1]", "the demo sets this key itself"),
        ("evaluation.at_end=false", "measures at start and end"),
        ("trainer.max_step=3", "trainer.max_step: unknown key"),
        ("environments=[]", "evaluation: has nothing to measure without rewards"),
    ],
)
def test_a_setting_is_refused_with_its_key(
    option: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "build_model", build)
    monkeypatch.setattr(sys, "stdout", Output())
    run_dir = tmp_path / "demo"
    arguments = ["demo", "--task", "tools", "--run-dir", str(run_dir), option]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 2
    assert message in capsys.readouterr().err and not run_dir.exists()


class Output:
    """A standard output that can be reconfigured, as a terminal's."""

    def reconfigure(self, **_: object) -> None: ...
    def write(self, text: str) -> None: ...
    def flush(self) -> None: ...
