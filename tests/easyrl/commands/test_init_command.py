"""``easyrl init`` as a command: what it writes, and what it leaves as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from easyrl.config.file import load_config


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*arguments: str, said: str = "") -> tuple[int, str]:
    """Status and output; ``said`` is typed."""
    result = CliRunner().invoke(command_line(), ["init", *arguments], input=said)
    return result.exit_code, result.output


def test_it_asks_and_writes_a_file_that_loads() -> None:
    status, shown = init("first.yaml", said="\n\nmaths\nmath\n\n\n")
    assert status == 0, shown
    assert "'maths' is no built-in reward" in shown.replace("\n", " ")
    assert "easyrl up first.yaml" in shown
    assert load_config("first.yaml").rewards[0].name == "math"


def test_a_file_that_is_there_is_not_overwritten_unasked() -> None:
    Path("easyrl.yaml").write_text("mine")
    assert init("--yes")[0] == 2
    assert init(said="n\n")[0] == 1
    assert Path("easyrl.yaml").read_text() == "mine"
    assert init(said="y\n\n\n\n\n\n")[0] == 0
    Path("easyrl.yaml").write_text("mine")
    assert init("--yes", "--force")[0] == 0
    load_config("easyrl.yaml")


def test_a_bad_option_ends_it_and_nothing_is_written() -> None:
    status, shown = init("--yes", "--model", "nowhere")
    assert status == 2 and "--model: nowhere is not a directory" in shown
    assert not Path("easyrl.yaml").exists()


def test_nobody_who_answers_is_told_of_yes() -> None:
    status, shown = init()
    assert status == 2 and "use --yes" in shown
    assert not Path("easyrl.yaml").exists()
