"""CUDA's memory grows in place unless the user says otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from easyrl.runtime.allocator import CUDA_SETTINGS, use_expandable_segments


def test_segments_grow_where_nothing_is_set() -> None:
    environment: dict[str, str] = {"PATH": "/bin"}
    use_expandable_segments(environment)
    assert environment[CUDA_SETTINGS] == "expandable_segments:True"


@pytest.mark.parametrize("name", [CUDA_SETTINGS, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_users_settings_stay(name: str) -> None:
    environment = {name: "max_split_size_mb:512"}
    use_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}


_USED = """
import os
import torch
from easyrl.runtime.allocator import use_expandable_segments
use_expandable_segments(os.environ)
torch.cuda.init()
torch.empty(2**24, device="cuda")
print([s["is_expandable"] for s in torch.cuda.memory_snapshot()])
"""


@pytest.mark.gpu
def test_torch_reads_it_although_it_is_imported_already() -> None:
    done = subprocess.run([sys.executable, "-c", _USED], capture_output=True, text=True)
    assert done.stdout.strip() == "[True]", done.stderr
