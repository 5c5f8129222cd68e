"""Parts of the plugin in vLLM's own environment, without a server (``plugin_checks.py``)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference_client.vllm.plugin_server import PLUGIN_PATH
from tests.vllm_environment import VLLM_PYTHON

SCRIPT = Path(__file__).with_name("plugin_checks.py")
NAMES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(map(ast.unparse, node.decorator_list))
]


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    done = subprocess.run(
        [VLLM_PYTHON, str(SCRIPT)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": PLUGIN_PATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, results: dict[str, str | None]) -> None:
    assert results[name] is None, results[name]


def test_importing_the_receiver_does_not_import_vllm() -> None:
    # the trainer's environment has none
    program = (
        "import sys, easyrl.inference_client.vllm_plugin.easyrl_vllm.receiving; "
        "sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
