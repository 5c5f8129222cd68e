"""``easyrl lab`` and ``easyrl diff`` on runs of the demo's sizes in the default mode.

The model has hardly learnt the task, so that a reward of its own gives each group a signal.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from easyrl.demo.build_model import build_model
from easyrl.demo.task import write_splits
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import ROOT, run_trainer, trainer_environment

pytestmark = pytest.mark.slow
STEPS = 4  # of two updates in two batches
CLIP = "recipe.clip_eps_high=0.001"
RUNS = {
    "one": [],
    "rate": ["trainer.learning_rate=2e-4"],  # twice the demo's
    "two_updates": ["trainer.updates_per_batch=2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's configuration, and two with one key changed."""
    folder = tmp_path_factory.mktemp("demo")
    build_model(folder / "model", num_steps=30)
    write_splits(folder / "data", 0)
    with EmbeddedServerProcess(folder / "model", ["--num-threads", "1"]) as server:
        for name, changed in RUNS.items():
            run_trainer(
                [
                    *(sys.executable, "-m", "easyrl.train", "configs/demo.yaml"),
                    f"run.output_dir={folder / name}",
                    f"model.path={folder / 'model'}",
                    f"data.files=[{folder / 'data/train.jsonl'}]",
                    f"inference.endpoints=[{server.url}]",
                    *("rewards=[{file: benchmarks/parity_reward.py}]", "evaluation=null"),
                    *(f"trainer.max_steps={STEPS}", "checkpoint.export_at_end=false"),
                    *changed,
                ],
                timeout_s=600,
            )
    return {name: folder / name for name in RUNS}


def easyrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "easyrl", *map(str, arguments)],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )


def lab(run: Path, step: int, *variants: str) -> dict[str, Any]:
    asked = [option for variant in variants for option in ("--with", variant)]
    result = easyrl("lab", run, "--step", str(step), "--json", *asked)
    assert result.returncode == 0, result.stderr[-3000:]
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(("name", "step"), [("one", STEPS), ("rate", 2), ("two_updates", STEPS)])
def test_the_run_s_own_settings_have_its_gradient(
    runs: dict[str, Path], name: str, step: int
) -> None:
    told = lab(runs[name], step)
    (line,) = (m for m in read_metrics(runs[name] / "metrics.jsonl") if m["step"] == step)
    assert told["rows"][0]["metrics"]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-6)
    assert told["difference"] <= 1e-6


def test_a_clip_acts_behind_the_first_update(runs: dict[str, Path]) -> None:
    own, clipped = lab(runs["two_updates"], STEPS, CLIP)["rows"]
    assert clipped["metrics"]["policy/clipped"] > own["metrics"]["policy/clipped"]
    assert clipped["metrics"]["policy/clip_high"] > 0
    assert clipped["gradient_cosine"] == pytest.approx(1, abs=1e-9)
    (later,) = clipped["later_cosines"]
    assert later < 1 - 1e-6 and clipped["update_cosine"] < 1 - 1e-6


def test_a_clip_that_cannot_act_is_told_of(runs: dict[str, Path]) -> None:
    told = lab(runs["one"], 1, CLIP, "trainer.learning_rate=2e-4")
    assert ["clip_eps_high cannot act: with one update" in said for said in told["at_rest"]] == [
        True
    ]
    own, clipped, rate = told["rows"]
    assert clipped["later_cosines"] == [] and clipped["update_cosine"] == pytest.approx(1)
    assert rate["update_norm"] == pytest.approx(2 * own["update_norm"], rel=1e-3)


def test_a_base_that_is_not_the_run_s_is_told_of_and_ends_with_1(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """Here its metrics say something else; elsewhere another machine computes otherwise."""
    run = tmp_path / "run"
    shutil.copytree(runs["one"], run)
    lines = read_metrics(run / "metrics.jsonl")
    first = next(line for line in lines if "grad_norm" in line)
    assert first["step"] == 1
    first["grad_norm"] *= 1 + 1e-4
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    result = easyrl("lab", run, "--step", "1")
    assert result.returncode == 1
    assert "gradient norm" in result.stdout and "the run's own" in result.stdout
    assert "1.0e-04 of its value away from the recorded one" in result.stderr
    assert "run.determinism=none: groups are trained in the run's order" in result.stderr


def test_diff_finds_the_key_that_was_changed(runs: dict[str, Path]) -> None:
    """Two updates: what became of the first batch's prompts. A rate: at the latest its metric, as
    an endpoint's last bits depend on what it computes at once."""
    for name, run in runs.items():
        assert easyrl("diff", run, run).returncode == 0, name
    parted = easyrl("diff", runs["one"], runs["two_updates"], "--json")
    assert parted.returncode == 1, parted.stderr
    difference = json.loads(parted.stdout)["difference"]
    assert difference["what"] == "outcome" and difference["batch"] == 0
    assert difference["other"] == "trained in update 1"
    parted = easyrl("diff", runs["one"], runs["rate"], "--json")
    assert parted.returncode == 1, parted.stderr
    assert json.loads(parted.stdout)["difference"]["batch"] == 0
