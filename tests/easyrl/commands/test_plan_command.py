"""``easyrl plan --model``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line

OF_8B = ["--model", "8b", "--device", "h100", "--devices", "16", "--batch-size", "16"]


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(command_line(), ["plan", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_a_batch_that_nobody_has_run(tmp_path: Path) -> None:
    tree = json.loads(run(*OF_8B, "--json"))
    assert tree["measured_step_s"] is None
    first = tree["rows"][0]
    used = first["endpoints"] * first["devices_per_endpoint"]
    used += first["ranks"] * first["tensor"] * first["pipeline"]
    assert used <= 16 and first["batch_size"] == 16 and first["fits"] is True
    picture = tmp_path / "split.png"
    output = run(*OF_8B, "--png", str(picture))
    assert "rates by arithmetic, from assumptions" in output
    assert f"{first['step_s']:.2f}" in output and f"ZeRO {first['zero_stage']}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give a run's folder, or --model and --device"),
        (("runs/x", "--model", "8b"), "give a run's folder, or --model and --device"),
        (("--model", "7b"), "'7b' is no folder, and none of 8b"),
        (("--model", "8b", "--device", "tpu"), "'tpu' is not known; one of 910b, h100"),
        (("--model", "8b", "--ranks", "4"), "leave out --endpoints"),
        (("--model", "8b", "--mean-tokens", "20000"), "below 15,360"),
        (("--model", "32b", "--devices", "4"), "has the memory to train this model"),
        (("--model", "8b", "--mode", "both"), "--mode: is 'both'; async or sync"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in run(*arguments, status=2)
