"""SIGTERM or Ctrl-C at any moment of the start: one sentence, and the status of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.parts.random_model import write_prompts
from tests.end_to_end.trainer_run import ROOT, trainer_command, trainer_environment

# Sends the signal to its own process when that begins to import a module, from its first line on.
SIGNALLING = """
import os, sys
def signalling(event, arguments):
    if event == "import" and arguments[0] == os.environ["SIGNAL_AT"]:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.addaudithook(signalling)
"""
REWARD = """
import os
os.kill(os.getpid(), int(os.environ["SIGNAL"]))
def reward_func(prompt, texts, token_ids):
    return [0.0 for _ in texts]
"""


def start(command: list[str], number: int, tmp_path, at: str) -> tuple[int, str]:
    (tmp_path / "sitecustomize.py").write_text(SIGNALLING)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=trainer_environment(PYTHONPATH=path, SIGNAL_AT=at, SIGNAL=str(number)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stderr


@pytest.fixture
def command(served, tmp_path) -> list[str]:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4, 12)
    return trainer_command(tmp_path / "run", served.model, prompts, [served.url])


@pytest.mark.parametrize(
    "at, number",
    [
        ("easyrl.config", signal.SIGTERM),  # the first import that takes long
        ("omegaconf", signal.SIGINT),
        pytest.param("easyrl.runtime.stopping", signal.SIGTERM, marks=pytest.mark.runs),
        ("torch", signal.SIGINT),
        ("easyrl.build.parts", signal.SIGTERM),
        # when most is imported
        pytest.param("easyrl.runtime.watchdog", signal.SIGINT, marks=pytest.mark.runs),
    ],
)
def test_a_signal_at_the_start_has_its_sentence_and_its_status(command, tmp_path, at, number):
    status, said = start(command, number, tmp_path, at)
    assert status == 128 + number, said
    assert said.count(f"easyrl: {number.name} ended it before") == 1
    assert "Traceback" not in said and not (tmp_path / "run").exists()


def test_the_console_script_is_covered_too(tmp_path):
    command = [sys.executable, "-m", "easyrl", "verify", str(tmp_path)]
    status, said = start(command, signal.SIGINT, tmp_path, "typer")
    assert (status, said) == (130, "easyrl: SIGINT ended it before it began\n")


def test_a_signal_while_a_users_file_is_imported_is_not_taken_for_its_error(command, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    command.append(f"rewards=[{{file: {tmp_path / 'reward.py'}}}]")
    status, said = start(command, signal.SIGTERM, tmp_path, "")
    assert status == 143, said
    assert "easyrl: SIGTERM ended it before training" in said and "rewards[0]" not in said
