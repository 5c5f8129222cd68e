"""Trackers' own packages, installed apart: ``make test-trackers``.

Elsewhere they are missing, and those tests are skipped; whoever asks for them is told, as a skip
would look like a pass.
"""

import os
from importlib import import_module
from typing import Any

import pytest

VARIABLE = "EASYRL_TEST_TRACKERS"  # set: a package that is missing fails the test


def package(name: str) -> Any:
    """The module ``name``."""
    if VARIABLE in os.environ:
        return import_module(name)
    reason = f"{name.partition('.')[0]} is not installed: run make test-trackers"
    return pytest.importorskip(name, reason=reason)
