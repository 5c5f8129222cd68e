"""The plan against what real engines hold and allocate (CPU, gloo)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from easyrl.engines.deepspeed.config import REDUCE_BUCKET
from easyrl.engines.deepspeed.memory import WEIGHT
from easyrl.memory_plan.plan import plan_memory
from easyrl.runtime.machine import free_port
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.easyrl.memory_plan.memory_cases import ROW_TOKENS, SIZES, save_models
from tests.easyrl.memory_plan.memory_plan_worker import CASES, case_config
from tests.easyrl.memory_plan.split_cases import SPLIT_CASES, split_config

HELD, RUNNING = 0.01, 0.15  # relative
FOLDER = "tests/easyrl/memory_plan"

Measured = dict[str, int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def measured(models: Path) -> dict[str, Measured]:
    worker = str(ROOT / FOLDER / "memory_plan_worker.py")
    output = run([sys.executable, worker, str(models), *CASES])
    results = models / "measured.json"
    assert results.exists(), output[-6000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def split(models: Path) -> dict[str, list[Measured]]:
    """By case and rank."""
    pytest.importorskip("megatron.core")
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    worker = [str(ROOT / FOLDER / "split_memory_worker.py"), str(models), *SPLIT_CASES]
    output = run([*launcher, "--master_port", str(free_port()), *worker])
    results = models / "split.json"
    assert results.exists(), output[-6000:]
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_an_engine_needs(
    models: Path, measured: dict[str, Measured], name: str
) -> None:
    settings, got = case_config(models, name), measured[name]
    (stage,) = plan_memory(settings, 1, on_cpu=True).stages
    assert got["held"] == pytest.approx(stage.held_bytes, rel=HELD)
    bucket = 0  # of constant size; ZeRO 2 allots it in the backward
    if settings.trainer.zero_stage == 2:
        bucket = REDUCE_BUCKET * WEIGHT[settings.model.dtype]
    running = stage.running.activations + stage.running.working
    assert got["running"] - bucket == pytest.approx(running, rel=RUNNING)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_CASES)
def test_a_plan_is_what_each_stage_of_a_split_model_needs(
    models: Path, split: dict[str, list[Measured]], name: str
) -> None:
    settings = split_config(models, name)
    planned, parallel = plan_memory(settings, 2, on_cpu=True).stages, settings.parallel
    hidden = ROW_TOKENS * SIZES["hidden_size"] * WEIGHT[settings.model.dtype]
    num_models = 1 + (planned[0].held.frozen > 0)
    for rank, got in enumerate(split[name]):
        stage = planned[rank % len(planned)]
        # what a schedule's last row leaves: messages of all models, or tokens that were gathered
        left = hidden * parallel.sequence
        if parallel.pipeline > 1:
            left += 2 * hidden * num_models * (parallel.chunks_per_stage - stage.stage.is_first)
        assert got["held"] - left == pytest.approx(stage.held_bytes, rel=HELD)
        running = stage.running.activations + stage.running.working
        assert got["running"] == pytest.approx(running, rel=RUNNING)
