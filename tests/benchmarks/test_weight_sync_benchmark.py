"""The weight sync benchmark prints what it promises; its figures are for a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.weight_sync import random_weights


def test_random_weights_have_the_size_asked_for() -> None:
    for num_bytes in (2_000_000, 100_000_000):
        weights = random_weights(num_bytes)
        assert sum(weight.nbytes for weight in weights.values()) == num_bytes
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
        assert all(bool(weight.isfinite().all()) for weight in weights.values())


@pytest.mark.slow
def test_a_small_run() -> None:
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--gb", "0.01", "--repeats", "1"]
    ended = subprocess.run(
        [*command, "--receivers", "1", "2", "--chunk-mb", "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert [(row["transport"], row["receivers"]) for row in rows] == [
        ("file", 1),
        ("http", 1),
        ("file", 2),
        ("http", 2),
    ]
    for row in rows:
        speeds = ("gb_per_s", "receive_gb_per_s", "memcpy_gb_per_s", "http_gb_per_s")
        assert row["gb"] == 0.01 and all(row[name] > 0 for name in speeds)
