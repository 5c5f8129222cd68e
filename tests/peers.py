"""Other trainers that recipes are compared with, installed apart: ``make test-peers``.

Elsewhere they are missing, and those tests are skipped; whoever asks for them is told, as a skip
would look like a pass.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "EASYRL_TEST_PEERS"  # set: a peer that is missing fails the test


def peer(name: str) -> Any:
    """The module ``name``."""
    if VARIABLE in os.environ:
        return import_module(name)
    return pytest.importorskip(name, reason=_missing(name))


def peer_folder(name: str) -> Path:
    """The package ``name``'s, for one that cannot be imported as a whole."""
    found = find_spec(name)
    if found is None:
        (pytest.fail if VARIABLE in os.environ else pytest.skip)(_missing(name))
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def _missing(name: str) -> str:
    return f"{name.partition('.')[0]} is not installed: run make test-peers"
