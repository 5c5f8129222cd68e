"""``trainer.optimizer``: each name alone and on two ranks, in every ZeRO stage that takes it (CPU).

One launch per number of ranks runs all cases in turn (``optimizer_worker.py``); the tests read what
was measured. Adam and Muon take the same step at any scale of the gradient, so the norm before the
clip and the running mean of the clipped gradients are compared beside the weights.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from easyrl.config import ConfigError, ModelConfig, TrainerConfig
from easyrl.engines.deepspeed.late_denominator import LateScalarOptimizer
from easyrl.engines.deepspeed.muon import IS_MUON, MuonWithAdamW
from easyrl.engines.deepspeed.optimizers import (
    fused_adam,
    make_optimizer,
    muon_groups,
    parameter_groups,
    trained,
)
from easyrl.models.loading import load_policy_model
from easyrl.runtime.machine import free_port
from tests.easyrl.engines.optimizer_cases import (
    LEARNING_RATE,
    MUON_LEARNING_RATE,
    NUM_STEPS,
    STAGES,
    installed,
    prepare,
)
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run
from tests.tiny_models import save_tiny_model

# Of the weights' movement, in fp32 against fp64, at worst that of a norm, which moves little;
# measured 1e-4. Of 8-bit moments some are rounded to the other neighbour; measured 1e-3.
MOVED = {"adamw": 5e-4, "adam8bit": 5e-3, "muon": 5e-4}
Results = dict[str, Any]


class Launch(NamedTuple):
    ranks: list[dict[str, Results]]  # by case

    def cases(self, kind: str, name: str = "") -> dict[str, list[Results]]:
        """Of all ranks, by what follows ``kind``."""
        found = {
            case.removeprefix(f"{kind}/"): [rank[case] for rank in self.ranks]
            for case in self.ranks[0]
            if case.startswith(f"{kind}/{name}")
        }
        assert found, (kind, name)
        for case, ranks in found.items():
            assert "error" not in ranks[0], f"{kind}/{case}: {ranks[0]['error']}"
        return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, marks=pytest.mark.runs, id="ranks-1"),
        pytest.param(2, marks=[pytest.mark.runs, pytest.mark.slow], id="ranks-2"),  # minutes
    ],
)
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    num_ranks = request.param
    folder = tmp_path_factory.mktemp("optimizers")
    prepare(folder)
    worker = [str(ROOT / "tests/easyrl/engines/optimizer_worker.py"), str(folder)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    output = run([sys.executable, *worker] if num_ranks == 1 else [*launcher, *worker])
    files = [folder / f"results-rank{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), output[-6000:]
    return Launch([json.loads(file.read_text()) for file in files])


@pytest.fixture
def alone(launch: Launch) -> Launch:
    """For what two ranks do not repeat."""
    if len(launch.ranks) > 1:
        pytest.skip("alone")
    return launch


@pytest.fixture(params=STAGES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param not in installed():
        pytest.skip("bitsandbytes is not installed")
    return request.param


@pytest.fixture(params=[each for each in STAGES if each != "adamw"])
def other_than_adamw(request: pytest.FixtureRequest) -> str:
    if request.param not in installed():
        pytest.skip("bitsandbytes is not installed")
    return request.param


# ---- the denominator ---------------------------------------------------------------------------


def test_steps_are_those_of_the_plain_optimizer_on_the_mean_loss(launch: Launch, name: str) -> None:
    """Four batches of other sizes and numbers of rows, with a clip that acts and without."""
    cases = launch.cases("steps", name)
    clipped = {f"{name}/{stage}/clipped" for stage in STAGES[name]}
    assert cases.keys() == clipped | {f"{name}/1/unclipped"}
    for case, ranks in cases.items():
        for steps in (rank["steps"] for rank in ranks):
            assert len(steps) == NUM_STEPS
            for i, step in enumerate(steps):
                # later gradients are those of weights that differ a little, in 8 bits by more;
                # measured 1e-4 in 8 bits, else up to 1.2e-5 by the processor's kernels
                norm = 1e-3 if i > 0 and name == "adam8bit" else 5e-5
                assert step["norm"] < norm, (case, i, step)
                assert step["moved"] < MOVED[name], (case, i, step)
            assert any(step["clipped"] for step in steps) == case.endswith("/clipped"), case
        if len(launch.ranks) == 1:
            assert len({step["rows"] for step in ranks[0]["steps"]}) > 1, case


@pytest.mark.parametrize("elementwise", ["adamw", "muon"])
def test_running_means_are_of_divided_and_clipped_gradients(
    launch: Launch, elementwise: str
) -> None:
    """First moments, Muon's momentum: of every weight, in every step."""
    for case, ranks in launch.cases("steps", elementwise).items():
        for step in (step for rank in ranks for step in rank["steps"]):
            assert step["num_averages"] > 30, case
            assert step["averages"] < 5e-5, (case, step)  # measured 1e-5 to 1.8e-5


def test_muon_as_torch_rounds_it(alone: Launch) -> None:
    """In bf16, which the other comparisons leave out on both sides."""
    (ranks,) = alone.cases("rounded").values()
    first, *_ = ranks[0]["steps"]
    assert first["averages"] < 2e-5 and first["moved"] < 0.2, first  # measured 0.08


def test_a_denominator_that_is_left_out_is_seen(alone: Launch, name: str) -> None:
    for case, ranks in alone.cases("undivided", name).items():
        for step in ranks[0]["steps"]:
            assert step["norm"] > 1, (case, step)
            assert step["moved"] > 2 * MOVED[name], (case, step)


def test_groups_have_rates_of_their_own_under_one_schedule(launch: Launch) -> None:
    for case, ranks in launch.cases("steps", "muon").items():
        for i, step in enumerate(ranks[0]["steps"]):
            left = 1 - (i + 1) / (2 * NUM_STEPS)  # after the step: of the next one
            *others, matrices = step["rates"]
            assert others == pytest.approx([LEARNING_RATE * left] * 2), case
            assert matrices == pytest.approx(MUON_LEARNING_RATE * left), case


def test_the_optimizer_is_the_one_that_was_named(launch: Launch, name: str) -> None:
    expected = {"adamw": "AdamW", "adam8bit": "AdamW8bit", "muon": "MuonWithAdamW"}[name]
    for case, ranks in launch.cases("steps", name).items():
        assert {rank["type"] for rank in ranks} == {expected}, case


def test_matrices_lie_on_both_ranks(launch: Launch) -> None:
    """So that what puts them together has run; and every rank has the same weights afterwards."""
    if len(launch.ranks) == 1:
        pytest.skip("needs two ranks")
    for case, ranks in launch.cases("steps", "muon").items():
        is_sharded = not case.startswith("muon/0/")
        assert all((rank["num_split"] > 0) == is_sharded for rank in ranks), case
    for stage, ranks in launch.cases("shared").items():
        assert all(rank["same"] for rank in ranks), stage


def test_bf16_steps_from_fp32_sums(launch: Launch, other_than_adamw: str) -> None:
    """One step of the masters, by the plain optimizer from AdamW's clipped gradient."""
    cases = launch.cases("bf16", other_than_adamw)
    assert len(cases) == (2 if other_than_adamw == "muon" else 3)
    for case, ranks in cases.items():
        for rank in ranks:
            assert rank["moved"] < MOVED[other_than_adamw], (case, rank)
            assert rank["norms"][0] == pytest.approx(rank["norms"][1], rel=1e-6), (case, rank)


# ---- checkpoints -------------------------------------------------------------------------------


def test_resumed_run_continues_to_the_bit(launch: Launch, other_than_adamw: str) -> None:
    for case, ranks in launch.cases("resume", other_than_adamw).items():
        assert ranks[0]["loading_changed"] > 0, case
        for rank in ranks:
            assert rank["loaded"] and rank["continued"], case
            assert rank["learning_rates"][0] == rank["learning_rates"][1] > 0, (case, rank)
            assert rank["norms"][0] == rank["norms"][1], (case, rank)


def test_discarded_gradients_leave_no_trace(alone: Launch, other_than_adamw: str) -> None:
    """In the momentum neither."""
    for case, ranks in alone.cases("discard", other_than_adamw).items():
        for rank in ranks:
            assert rank["same"] and rank["norms"][0] == rank["norms"][1] > 0, (case, rank)


def test_another_zero_stage_has_the_same_momentum(launch: Launch) -> None:
    for case, ranks in launch.cases("other", "muon").items():
        for rank in ranks:
            assert rank["saved"] > 30 and rank["stage"] == "" and rank["stage_equal"], (case, rank)


def test_blocks_of_8_bit_moments_stay_where_they_are(launch: Launch) -> None:
    if "adam8bit" not in installed():
        pytest.skip("bitsandbytes is not installed")
    for case, ranks in launch.cases("other", "adam8bit").items():
        for rank in ranks:
            assert "blocks of 8-bit moments is " in rank["stage"], (case, rank)
            assert "resume with the settings it was written with" in rank["stage"], (case, rank)
            assert rank["stage_unchanged"], case


def test_checkpoint_of_another_optimizer_is_refused(launch: Launch, other_than_adamw: str) -> None:
    for case, ranks in launch.cases("other", other_than_adamw).items():
        for rank in ranks:
            expected = f"trainer.optimizer is {other_than_adamw}, now adamw"
            assert expected in rank["optimizer"] and rank["optimizer_unchanged"], (case, rank)


# ---- what is trained ---------------------------------------------------------------------------


def test_adapters_alone_are_stepped(alone: Launch, other_than_adamw: str) -> None:
    for case, ranks in alone.cases("lora", other_than_adamw).items():
        for rank in ranks:
            assert rank["frozen_unchanged"] and rank["of_a"] == 0, (case, rank)
            assert len(rank["trained"]) == 2 * 3 * 7  # A and B, layers, projections
            assert all(".lora_" in parameter for parameter in rank["trained"]), case
            assert all(moved > 0 for moved in rank["rms"].values()), (case, rank)


def test_muons_update_has_the_size_of_adamws(alone: Launch) -> None:
    """0.2 of the rate, the singular values being 1 within what the iteration leaves open."""
    for case, ranks in alone.cases("lora", "muon").items():
        for moved in ranks[0]["rms"].values():
            assert 0.1 < moved / MUON_LEARNING_RATE < 0.26, (case, ranks[0]["rms"])
        assert not ranks[0]["has_adamw"], case  # there are matrices only


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    decaying, others = parameter_groups(trained(model), 0.1)
    assert decaying["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert [p.ndim for p in decaying["params"]] == [2]
    assert [p.ndim for p in others["params"]] == [1, 1, 1]


def test_a_matrix_decays_where_zero_3_holds_its_shards() -> None:
    """Of a partitioned parameter an empty vector is left (``zero.Init``)."""
    model = nn.Sequential(nn.Linear(3, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.data = torch.empty(0)
    decaying, others = parameter_groups(trained(model), 0.1)
    assert [p.ds_shape for p in decaying["params"]] == [(2, 3)]
    assert [p.ds_shape for p in others["params"]] == [(2,)]


@pytest.mark.parametrize(
    ("device", "offload", "fused"),
    [("cuda", False, True), ("cuda", True, True), ("cpu", True, True), ("cpu", False, None)],
)
def test_adam_is_fused_where_that_saves_memory_or_time(
    device: str, offload: bool, fused: bool | None
) -> None:
    assert fused_adam(device, offload=offload) is fused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    save_tiny_model(tmp_path / "moe", "qwen3_moe")
    save_tiny_model(tmp_path / "tied", "qwen2", tied=True)
    return tmp_path


@pytest.mark.parametrize("model", ["policy", "tied"])
def test_muon_takes_the_layers_matrices_and_nothing_else(folder: Path, model: str) -> None:
    policy = load_policy_model(ModelConfig(path=folder / model, dtype="fp32"))
    trainer = TrainerConfig(optimizer="muon", weight_decay=0.1, muon_learning_rate=0.3)
    decaying, others, matrices = muon_groups(policy, trainer)
    names = {id(p): name for name, p in policy.named_parameters()}

    def of(group: dict[str, Any]) -> set[str]:
        return {names[id(p)].removeprefix("model.") for p in group["params"]}

    head = {"lm_head.weight"} if model == "policy" else set()
    assert of(decaying) == {"model.embed_tokens.weight"} | head
    assert all("norm" in name or name.endswith(".bias") for name in of(others))
    assert of(matrices) == {
        n for n in of(matrices) if ".layers." in n and n.endswith("_proj.weight")
    }
    assert sum(len(g["params"]) for g in (decaying, others, matrices)) == len(names)
    assert [g["lr"] for g in (decaying, others, matrices)] == [1e-6, 1e-6, 0.3]
    assert [g["weight_decay"] for g in (decaying, others, matrices)] == [0.1, 0.0, 0.1]
    assert [g[IS_MUON] for g in (decaying, others, matrices)] == [False, False, True]


def test_frozen_embeddings_are_in_no_group(folder: Path) -> None:
    policy = load_policy_model(ModelConfig(path=folder / "policy", dtype="fp32"))
    policy.model.get_input_embeddings().requires_grad_(False)
    (frozen,) = policy.model.get_input_embeddings().parameters()
    groups = muon_groups(policy, TrainerConfig(optimizer="muon"))
    assert all(p is not frozen for group in groups for p in group["params"])
    groups = parameter_groups(trained(policy), 0.1)
    assert all(p is not frozen for group in groups for p in group["params"])


def test_experts_in_one_tensor_are_refused_by_name(folder: Path) -> None:
    policy = load_policy_model(ModelConfig(path=folder / "moe", dtype="fp32"))
    with pytest.raises(ConfigError, match=r"trainer.optimizer: muon .*experts.* has 3 dimensions"):
        muon_groups(policy, TrainerConfig(optimizer="muon"))


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", None)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adamw_gets_its_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, device: str, fused: bool | None
) -> None:
    """Not run on CUDA: what torch's AdamW is called with there."""
    seen: dict[str, Any] = {}
    plain = torch.optim.AdamW

    def made(groups: Any, **settings: Any) -> torch.optim.Optimizer:
        seen.update(settings)
        return plain(groups, **settings | {"fused": None})

    monkeypatch.setattr(torch.optim, "AdamW", made)
    trainer = TrainerConfig(
        optimizer=optimizer, learning_rate=0.5, adam_betas=(0.8, 0.9), adam_eps=1e-3, zero_stage=1
    )
    policy = load_policy_model(ModelConfig(path=folder / "policy", dtype="fp32"))
    make_optimizer(trainer, policy, device)
    assert seen == {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "fused": fused}


def test_muons_momentum_is_the_one_configured(folder: Path) -> None:
    policy = load_policy_model(ModelConfig(path=folder / "policy", dtype="fp32"))
    for given, expected in ((None, 0.95), (0.8, 0.8)):
        trainer = TrainerConfig(optimizer="muon", muon_momentum=given, zero_stage=0)
        optimizer = make_optimizer(trainer, policy, "cpu")
        assert isinstance(optimizer, LateScalarOptimizer)
        assert isinstance(optimizer.optimizer, MuonWithAdamW)
        assert optimizer.optimizer.momentum == expected


def test_8_bit_adam_takes_the_arguments_that_it_gets() -> None:
    optimizers = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    parameters = inspect.signature(optimizers.AdamW8bit).parameters
    assert {"params", "lr", "betas", "eps", "weight_decay"} <= parameters.keys()
    assert inspect.signature(optimizers.AdamW8bit.init_state).parameters.keys() == {
        *("self", "group", "p", "gindex", "pindex")
    }


def test_8_bit_adam_without_its_package_names_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(importlib.sys.modules, module, None)  # type: ignore[attr-defined]
    policy = load_policy_model(ModelConfig(path=folder / "policy", dtype="fp32"))
    with pytest.raises(ConfigError, match=r"trainer.optimizer: adam8bit .*easyrl\[adam8bit\]"):
        make_optimizer(TrainerConfig(optimizer="adam8bit"), policy, "cpu")
