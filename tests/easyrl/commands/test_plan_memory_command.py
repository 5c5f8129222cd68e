"""``easyrl plan-memory``: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.__main__ import command_line
from tests.easyrl.memory_plan.test_plan import QWEN3_8B

CONFIG = """
model: {path: MODEL, activation_checkpointing: layer}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    QWEN3_8B.save_pretrained(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    return file


def run(config: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(command_line(), ["plan-memory", str(config), *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_a_plan_that_fits(config):
    output = run(config, "--world-size", "8", "--device-gb", "80")
    assert "Qwen3ForCausalLM, 8.19 B parameters, bf16; 8 processes: tensor 1" in output
    assert "fits: " in output
    # docs/memory.md: 2 + 2 bytes of gradients and state for 8.19 · 10⁹ parameters
    assert "weights" in output and "16.38" in output


def test_a_plan_that_does_not_fit_says_what_would(config):
    output = run(config, "--world-size", "2", "--device-gb", "80", status=1)
    assert "does not fit: " in output and "It would with: " in output
    proposed = output.rpartition("It would with: ")[2].split("|")[0].split()
    size = proposed[-2] if proposed[-1] == "processes" else "2"
    overrides = [word for word in proposed if "=" in word]
    run(config, *overrides, "--world-size", size, "--device-gb", "80")


def test_a_pipeline_has_a_column_for_each_stage(config):
    settings = ["parallel.tensor=2", "parallel.pipeline=2", "trainer.zero_stage=1"]
    output = run(config, *settings, "--device-gb", "80")
    assert "stage 0" in output and "stage 1" in output
    assert "4 processes: tensor 2 · pipeline 2 · data 1, ZeRO 1" in output
    tree = json.loads(run(config, *settings, "--device-gb", "80", "--json"))
    assert [stage["num_layers"] for stage in tree["stages"]] == [18, 18]
    assert [stage["rows_in_flight"] for stage in tree["stages"]] == [2, 1]
    assert tree["needed"] == max(stage["needed"] for stage in tree["stages"])
    assert tree["fits"] is True and tree["device"] == 80e9


def test_bad_input_is_named(config):
    assert "parallel" in run(config, "parallel.tensor=3", "trainer.zero_stage=1", status=2)
    run(config.with_name("none.yaml"), status=2)
