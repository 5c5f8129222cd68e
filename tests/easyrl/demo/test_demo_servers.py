"""The demo's choice of engine: what is missing is said before anything is built."""

from pathlib import Path

import pytest

from easyrl.demo.servers import VLLM_PYTHON, vllm_python


def test_the_interpreter_is_taken_from_the_environment(monkeypatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    assert vllm_python() == python


@pytest.mark.parametrize("value", [None, ""])
def test_an_interpreter_that_is_not_named_is_asked_for(monkeypatch, value: str | None) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    if value is not None:
        monkeypatch.setenv(VLLM_PYTHON, value)
    with pytest.raises(ValueError, match=f"--engine vllm: .*{VLLM_PYTHON} is not set; export"):
        vllm_python()


def test_an_interpreter_that_cannot_run_is_refused(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("no program")
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "python"))
    with pytest.raises(ValueError, match="is not an executable"):
        vllm_python()
