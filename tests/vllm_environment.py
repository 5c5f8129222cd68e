"""The interpreter of vLLM's environment, which tests marked ``vllm`` start servers with."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "EASYRL_VLLM_PYTHON"
VLLM_PYTHON = os.environ.get(VARIABLE, "")


def missing_vllm() -> str | None:
    """Why no test with vLLM can run, and the remedy; None where the interpreter is there."""
    remedy = f"run make test-vllm, or set {VARIABLE} to the python of an environment with vLLM"
    if not VLLM_PYTHON:
        return f"{VARIABLE} is not set: {remedy}"
    if not Path(VLLM_PYTHON).is_file():
        return f"{VARIABLE} is {VLLM_PYTHON}, which is no file: {remedy}"
    return None
