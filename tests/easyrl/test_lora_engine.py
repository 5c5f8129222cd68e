"""Adapters trained by ``DeepSpeedEngine`` on two ranks, ZeRO 0 to 3 (CPU, gloo).

One launch runs all cases in turn (``lora_worker.py``); the tests read what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from easyrl.inference_client.servers.server_process import free_port
from tests.easyrl.lora_cases import BEHAVIOUR, LORA, STAGES, prepare
from tests.easyrl.test_deepspeed_engine import ROOT, run

MLP = ("gate_proj", "up_proj", "down_proj")
SHAPES = {  # of the tiny Qwen3's linear layers: inputs and outputs
    **{"q_proj": (32, 64), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (64, 32)},
    **{"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)},
}
Results = list[dict[str, dict[str, Any]]]  # by rank and case


def launch(folder: Path, phase: str, num_ranks: int) -> Results:
    worker = [str(ROOT / "tests/easyrl/lora_worker.py"), str(folder), phase]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    files = [folder / f"{phase}-rank{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), output[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("lora"))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Results:
    return launch(folder, "train", 2)


@pytest.fixture(params=[f"behaviour/{stage}/{dtype}" for stage, dtype in BEHAVIOUR])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_and_its_norm_are_the_adapters_alone(trained: Results, stage: int) -> None:
    """Against dense fp64 peft; the clip acts on the norm of the adapters' gradient."""
    for rank in trained:
        result = rank[f"gradient/{stage}"]
        assert result["gradient"] < 1e-5 and result["norm"] < 1e-5, result
        assert result["clipped"] and result["base_unchanged"]


def test_reference_is_the_policy_without_the_adapter(trained: Results, case: str) -> None:
    """To the bit at the start, and as it was when the policy has moved."""
    for rank in trained:
        result = rank[case]
        assert result["reference_is_policy"] == result["reference_moved"] == 0, result
        assert result["policy_moved"] > 0.1, result


def test_old_policy_is_an_adapter_of_the_same_model(trained: Results, case: str) -> None:
    for rank in trained:
        assert rank[case]["old_is_policy"] == rank[case]["old_is_the_policy_before"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_updates_of_a_batch_share_its_old_policy(trained: Results, stage: int) -> None:
    for rank in trained:
        result = rank[f"updates/{stage}"]
        assert [update["skipped"] for update in result["updates"]] == [True, False], result
        assert [update["old"] for update in result["updates"]] == [0, 0], result
        assert result["moved"] > 0.1, result


def test_a_step_changes_the_adapters_and_nothing_else(trained: Results, case: str) -> None:
    expected = {
        f"model.layers.{layer}.{'mlp' if target in MLP else 'self_attn'}.{target}.weight"
        for layer in range(2)
        for target in LORA.target_modules
    }
    assert set(trained[0][case]["changed"]) == expected
    assert all(rank[case]["base_unchanged"] for rank in trained)


def test_optimizer_holds_the_adapters_alone(trained: Results, case: str) -> None:
    elements = 2 * sum(LORA.rank * (inputs + outputs) for inputs, outputs in SHAPES.values())
    assert sum(rank[case]["master_elements"] for rank in trained) == elements


def test_perturbation_reaches_every_served_weight(trained: Results, case: str) -> None:
    for rank in trained:
        assert rank[case]["unperturbed"] == 0 and rank[case]["perturbation_moved"] > 0.02


def test_a_loaded_checkpoint_continues_to_the_bit(trained: Results, case: str) -> None:
    for rank in trained:
        result = rank[case]
        assert result["loaded"] and result["loaded_weights"] and result["loaded_old"], result
        assert result["continued"]


@pytest.mark.slow
def test_another_number_of_ranks_resumes(folder: Path, trained: Results, case: str) -> None:
    """Only adapters are saved; an adapter of another rank is refused."""
    results = folder / "resume-rank0.json"
    (alone,) = (
        [json.loads(results.read_text())] if results.exists() else launch(folder, "resume", 1)
    )
    assert alone[case]["weights"] == trained[0][case]["weights"]
    assert alone[case]["only_adapters"]
    assert alone[case]["kinds"] == ["exp_avg", "exp_avg_sq", "master", "old_policy", "step"]
    assert "model.lora is {'rank': 3" in alone[case]["refusal"]
