"""``easyrl lab`` and ``easyrl diff`` on recorded runs of which one key differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import ROOT, run_trainer, trainer_command, trainer_environment

pytestmark = pytest.mark.slow
STEP = 3  # between the checkpoints of steps 2 and 4
VARIANTS = [
    "recipe.advantage=group_mean",
    "trainer.learning_rate=2e-3",
    "trainer.packing=tree trainer.max_tokens_per_micro_batch=96",
    "'recipe={name: gspo}'",
]


def easyrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "easyrl", *map(str, arguments)],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs with equal seeds; the second one learns at three times the rate."""
    folder = tmp_path_factory.mktemp("lab")
    prompts = write_prompts(folder / "prompts.jsonl", 24, 12)
    options = [
        *("trainer.batch_size=6", "trainer.max_steps=4", "rollout.max_tokens=12"),
        *("rollout.num_generations=4", "trainer.max_tokens_per_micro_batch=64"),
        *("journal.keep=all", "checkpoint.every_steps=2", "trainer.zero_stage=2"),
        "run.determinism=strict",
    ]
    model = write_random_model(folder / "model", hidden_size=32, num_layers=1)
    with EmbeddedServerProcess(model, ["--num-threads", "1", "--batch-invariant"]) as server:
        for name, rate in (("one", "1e-3"), ("two", "3e-3")):
            command = trainer_command(folder / name, model, prompts, [server.url], *options)
            run_trainer([*command, f"trainer.learning_rate={rate}"])
    return folder / "one", folder / "two"


@pytest.fixture(scope="module")
def compared(runs: tuple[Path, Path]) -> dict[str, Any]:
    """What the command prints; nothing of the run is touched."""
    before = {file: file.read_bytes() for file in runs[0].rglob("*") if file.is_file()}
    asked = [option for variant in VARIANTS for option in ("--with", variant)]
    result = easyrl("lab", runs[0], "--step", str(STEP), "--json", *asked)
    assert result.returncode == 0, result.stderr[-3000:]
    assert before == {file: file.read_bytes() for file in runs[0].rglob("*") if file.is_file()}
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


def test_the_run_s_own_settings_have_its_gradient(
    runs: tuple[Path, Path], compared: dict[str, Any]
) -> None:
    recorded = read_metrics(runs[0] / "metrics.jsonl")[STEP]
    own = compared["rows"][0]
    assert recorded["step"] == STEP and own["settings"] == []
    assert own["metrics"]["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-6)
    assert own["metrics"]["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
    assert own["gradient_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-6)
    assert own["gradient_cosine"] == pytest.approx(1, abs=1e-12)


def test_variants(compared: dict[str, Any]) -> None:
    own, mean, rate, tree, gspo = compared["rows"]
    assert [row["settings"] for row in (mean, rate)] == [[VARIANTS[0]], [VARIANTS[1]]]
    assert mean["metrics"]["grad_norm"] != pytest.approx(own["metrics"]["grad_norm"], rel=1e-3)
    # Adam's step is proportional to the rate: without weight decay twice of it
    assert rate["gradient_cosine"] == pytest.approx(1, abs=1e-9)
    assert rate["update_norm"] == pytest.approx(2 * own["update_norm"], rel=1e-3)
    assert tree["gradient_cosine"] == pytest.approx(1, abs=1e-6)
    assert tree["metrics"]["tokens/packed"] <= own["metrics"]["tokens/packed"]
    assert gspo["gradient_cosine"] < 1 - 1e-6  # means of sequences, not of tokens


def test_what_cannot_be_compared_is_told(runs: tuple[Path, Path]) -> None:
    wrong = easyrl("lab", runs[0], "--step", "9")
    assert wrong.returncode == 2 and "steps 1 to 4" in wrong.stderr
    wrong = easyrl("lab", runs[0], "--step", "2", "--with", "recipe.clip=0.3")
    assert wrong.returncode == 2 and "recipe.clip" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_diff_finds_where_the_runs_part(runs: tuple[Path, Path]) -> None:
    """The rate is none of the first step's samples, but of its metrics."""
    assert easyrl("diff", runs[0], runs[0]).returncode == 0
    parted = easyrl("diff", *runs, "--json")
    assert parted.returncode == 1, parted.stderr
    difference = json.loads(parted.stdout)["difference"]
    assert (difference["what"], difference["name"]) == ("metrics", "learning_rate")
    assert (difference["step"], difference["one"], difference["other"]) == (1, 1e-3, 3e-3)
