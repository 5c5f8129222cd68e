"""Adapters trained by ``DeepSpeedEngine`` on two ranks, ZeRO 0 to 3 (CPU, gloo).

One launch runs all cases in turn (``lora_worker.py``); the tests read what was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from easyrl.runtime.machine import free_port
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.easyrl.models.lora_cases import EVERY, LORA, QUICK, prepare

pytestmark = pytest.mark.runs

MLP = ("gate_proj", "up_proj", "down_proj")
SHAPES = {  # of the tiny Qwen3's linear layers: inputs and outputs
    **{"q_proj": (32, 64), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (64, 32)},
    **{"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)},
}
Case = dict[str, Any]


class Trained(NamedTuple):
    """By rank and case, what was measured."""

    ranks: list[dict[str, Case]]
    folder: Path

    def cases(self, kind: str) -> dict[str, list[Case]]:
        """Of one kind, by name; of all ranks."""
        listed = (EVERY if "gradient/0/fp32" in self.ranks[0] else QUICK)[kind]
        names = [f"{kind}/{stage}/{dtype}" for stage, dtype in listed]
        return {name: [rank[name] for rank in self.ranks] for name in names}


def launch(folder: Path, phase: str, num_ranks: int) -> Trained:
    worker = [str(ROOT / "tests/easyrl/models/lora_worker.py"), str(folder), phase]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    files = [folder / f"{phase}-rank{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), output[-6000:]
    return Trained([json.loads(file.read_text()) for file in files], folder)


@pytest.fixture(scope="module", params=["quick", pytest.param("every", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = prepare(tmp_path_factory.mktemp("lora"))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    return launch(folder, request.param, 2)


def test_gradient_and_its_norm_are_the_adapters_alone(trained: Trained) -> None:
    """Against dense fp64 peft; the clip acts on the norm of the adapters' gradient."""
    for name, ranks in trained.cases("gradient").items():
        for case in ranks:
            assert_gradient(name, case)


def assert_gradient(name: str, case: Case) -> None:
    assert case["gradient"] < 1e-5 and case["norm"] < 1e-5, (name, case)  # measured 1.2e-6
    assert case["clipped"] and case["base_unchanged"], name


def test_gradient_is_the_same_with_less_memory(trained: Trained) -> None:
    for name, ranks in trained.cases("recomputed").items():
        for case in ranks:
            for checkpointing in ("layer", "selective"):
                assert_gradient(name, case[checkpointing])


def test_reference_is_the_policy_without_the_adapter(trained: Trained) -> None:
    """To the bit at the start, and as it was when the policy has moved."""
    for name, ranks in trained.cases("behaviour").items():
        for case in ranks:
            assert case["reference_is_policy"] == case["reference_moved"] == 0, (name, case)
            assert case["policy_moved"] > 0.1, (name, case)


def test_old_policy_is_an_adapter_of_the_same_model(trained: Trained) -> None:
    for name, ranks in trained.cases("behaviour").items():
        for case in ranks:
            assert case["old_is_policy"] == case["old_is_the_policy_before"] == 0, (name, case)


def test_updates_of_a_batch_share_its_old_policy(trained: Trained) -> None:
    for name, ranks in trained.cases("updates").items():
        for case in ranks:
            assert [update["skipped"] for update in case["updates"]] == [True, False], name
            assert [update["old"] for update in case["updates"]] == [0, 0], (name, case)
            assert case["moved"] > 0.1, (name, case)


def test_a_step_changes_the_adapters_and_nothing_else(trained: Trained) -> None:
    expected = {
        f"model.layers.{layer}.{'mlp' if target in MLP else 'self_attn'}.{target}.weight"
        for layer in range(2)
        for target in LORA.target_modules
    }
    for name, ranks in trained.cases("behaviour").items():
        assert set(ranks[0]["changed"]) == expected, name
        assert all(case["base_unchanged"] for case in ranks), name


def test_optimizer_holds_the_adapters_alone(trained: Trained) -> None:
    elements = 2 * sum(LORA.rank * (inputs + outputs) for inputs, outputs in SHAPES.values())
    for name, ranks in trained.cases("behaviour").items():
        assert sum(case["master_elements"] for case in ranks) == elements, name


def test_perturbation_reaches_every_served_weight(trained: Trained) -> None:
    for name, ranks in trained.cases("behaviour").items():
        for case in ranks:
            assert case["unperturbed"] == 0 and case["perturbation_moved"] > 0.02, (name, case)


def test_adapters_alone_can_be_perturbed_and_left_out(trained: Trained) -> None:
    """What travels where only adapters do: they change visibly, the model below never does."""
    for name, ranks in trained.cases("behaviour").items():
        assert ranks[0]["adapter_perturbed"] == ranks[0]["changed"], name
        for case in ranks:
            assert case["adapter_perturbation_moved"] > 0.02, (name, case)
            assert case["adapter_restored"] and case["below_is_the_start"], name


def test_a_loaded_checkpoint_continues_to_the_bit(trained: Trained) -> None:
    for name, ranks in trained.cases("behaviour").items():
        for case in ranks:
            assert case["loaded"] and case["loaded_weights"] and case["loaded_old"], (name, case)
            assert case["continued"], name


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["every"], indirect=True)
def test_another_number_of_ranks_resumes(trained: Trained) -> None:
    """Only adapters are saved; an adapter of another rank is refused."""
    alone = launch(trained.folder, "resume", 1).ranks[0]
    for name, ranks in trained.cases("behaviour").items():
        assert alone[name]["weights"] == ranks[0]["weights"], name
        assert alone[name]["only_adapters"], name
        kinds = ["exp_avg", "exp_avg_sq", "master", "old_policy", "step"]
        assert alone[name]["kinds"] == kinds, name
        assert "model.lora is {'rank': 3" in alone[name]["refusal"], name
