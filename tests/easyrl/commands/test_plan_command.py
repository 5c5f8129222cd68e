"""``easyrl plan``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.parts.long_run import LongRun, write_long_run
from easyrl.__main__ import command_line
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans
from tests.easyrl.simulation.test_advice import made

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


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Batches of which the first that counts is slower than the others."""
    run = tmp_path / "run"
    write_long_run(run, LongRun(num_steps=1, num_batches=0, num_endpoints=1))
    for number, train_s in enumerate([0.3, 0.6, 0.2, 0.2, 0.2, 0.3]):
        batch = made(24, train_s)
        TimelineFolder(run).write(BatchSpans(number, 0, batch.start_s, batch.end_s, batch.spans))
    return run


def test_the_run_is_compared_with_what_it_took(run_dir: Path) -> None:
    tree = json.loads(run(str(run_dir), "--json"))
    # 2 s until all are there, 24 groups, 1 s behind them; without the first batch and the last
    assert tree["measured_step_s"] == pytest.approx(2 + 24 * 0.2 + 1)
    assert tree["measured_mean_s"] == pytest.approx(2 + 24 * 0.3 + 1)
    output = run(str(run_dir))
    mean_s, drawn_s = tree["measured_mean_s"], tree["rows"][0]["step_s"]
    assert f"{mean_s:.2f} ({drawn_s / mean_s - 1:+.1%})" in output  # beside the row
    assert f"{drawn_s:.2f}" in output
    for key, name in (("step", "median"), ("mean", "mean")):
        own_s, replayed_s = tree[f"measured_{key}_s"], tree[f"replayed_{key}_s"]
        assert f"{own_s:.2f}{' s' if key == 'step' else ''} in the {name}" in output
        assert f"{replayed_s:.2f} ({replayed_s / own_s - 1:+.1%})" in output


def test_another_setting_has_nothing_measured(run_dir: Path) -> None:
    first, second = [
        line for line in run(str(run_dir), "--ranks", "2").splitlines() if " x 8 " in line
    ]
    assert "(the run)" in first and "%)" in first
    assert "(the run)" not in second and "%)" not in second
    assert "measured" not in run(str(run_dir), "--devices", "9").split("below:")[1]


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
        (("--model", "8b", "--mean-tokens", "nan"), "--mean-tokens: has to be a number above 0"),
        (("--model", "8b", "--sigma", "inf"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--mean-tokens", "nan"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--mean-tokens", "inf"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--mean-tokens", "-3"), "--mean-tokens: has to be a number above 0"),
        (("runs/x", "--sigma", "inf"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--sigma", "1e200"), "--sigma: has to be a number from 0 to 10"),
        (("runs/x", "--sigma", "nan"), "--sigma"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in run(*arguments, status=2)
