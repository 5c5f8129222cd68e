"""Tests with vLLM fail, and are not skipped, where its environment is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
TESTS = "tests/inference_client/vllm/test_plugin_units.py"


@pytest.mark.parametrize(
    "python, message",
    [
        (None, "EASYRL_VLLM_PYTHON is not set: run make test-vllm"),
        ("/nowhere/bin/python", "EASYRL_VLLM_PYTHON is /nowhere/bin/python, which is no file"),
    ],
)
def test_a_missing_environment_is_a_failure_that_names_the_remedy(python, message):
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment.pop("EASYRL_VLLM_PYTHON", None)
    if python is not None:
        environment["EASYRL_VLLM_PYTHON"] = python
    command = [sys.executable, "-m", "pytest", "-m", "vllm", "-p", "no:cacheprovider", TESTS]
    ended = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert message in ended.stdout
    assert re.search(r"\d+ (skipped|passed)", ended.stdout) is None
