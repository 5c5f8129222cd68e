"""Versions of what a run is built on, and of what its endpoints run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from easyrl.config import Config
from easyrl.doctor.finding import Finding, failed, ok

PACKAGES = ("torch", "transformers", "deepspeed")
OLDEST_PYTHON = (3, 11)


def check_versions(config: Config) -> Iterator[Finding]:
    """Of this environment; of packages only those that ``config`` needs."""
    found = sys.version_info
    said = f"python {found.major}.{found.minor}.{found.micro}"
    if found < OLDEST_PYTHON:
        yield failed("python", said, "make the environment with Python 3.11 or newer")
    else:
        yield ok("python", said)
    for package in PACKAGES:
        yield _package(package, f"pip install -c constraints.txt {package}")
    if config.parallel.is_split:
        yield _package("megatron-core", "pip install 'easyrl[megatron]', or remove parallel")


def _package(name: str, remedy: str) -> Finding:
    try:
        return ok(name, f"{name} {version(name)}")
    except PackageNotFoundError:
        return failed(name, f"{name} is not installed", remedy)
