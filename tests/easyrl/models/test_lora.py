"""Adapters against peft itself: gradients in fp64, merged weights, files; what is not trained."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from easyrl.config import ConfigError, LoraConfig, ModelConfig
from easyrl.config.file import validate_config
from easyrl.engines.deepspeed.optimizers import parameter_groups
from easyrl.engines.deepspeed.optimizers import trained as trained_parameters
from easyrl.engines.weight_names import adapter_weights, saved_weights
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.ledger.checkpoints.export import export_adapter, export_model
from easyrl.models.loading import load_policy_model
from easyrl.models.lora import OLD_POLICY, adapter_parameters, add_old_policy, frozen_adapter
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.models.tri_model import TriModel
from easyrl.schema import MicroBatch
from tests.easyrl.engines.engine_cases import (
    ENTROPY_COEF,
    KL_COEF,
    TEMPERATURE,
    denominator,
    relative_error,
    streamed,
)
from tests.easyrl.models.lora_cases import (
    LORA,
    SEED,
    dense_gold,
    load,
    lora_of,
    model_config,
    prepare,
)
from tests.recipes import token_grpo
from tests.tiny_models import FAMILIES, Family

CPU = torch.device("cpu")
OBJECTIVE = token_grpo(kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    """Of all families; the Qwen2 has biases, the Qwen3 a tied head."""
    return {f: prepare(tmp_path_factory.mktemp(f), f, tied=f == "qwen3") for f in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def folder(folders: dict[Family, Path], family: Family) -> Path:
    return folders[family]


@pytest.fixture
def qwen3(folders: dict[Family, Path]) -> Path:
    return folders["qwen3"]


def logprobs(policy: PolicyModel, row: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        return run_micro_batch(policy, row, TEMPERATURE)[0]


def of_frozen(policy: PolicyModel, row: MicroBatch, adapter: str | None) -> torch.Tensor:
    frozen = frozen_adapter(policy, policy, adapter)
    return frozen.logprobs([(row, SegmentLayout(row.segments))], TEMPERATURE)[0]


# ---- the adapter at the start --------------------------------------------------------------------


def test_it_is_drawn_from_the_seed_alone_and_changes_nothing_yet(qwen3: Path) -> None:
    config = model_config(qwen3, dtype="bf16")
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = load_policy_model(config, seed=SEED)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = (load_policy_model(config, seed=seed) for seed in (SEED, SEED + 1))
    for one, two, three in zip(
        *(adapter_parameters(m.model) for m in (first, again, other)), strict=True
    ):
        assert one.dtype == torch.bfloat16 and torch.equal(one, two)
        is_zero = bool((one == 0).all())
        assert is_zero == (one.shape[1] == LORA.rank)  # B [outputs, rank]
        assert is_zero or not torch.equal(one, three)
    row = streamed("token")[0]
    plain = load_policy_model(ModelConfig(path=qwen3 / "base"))
    assert torch.equal(logprobs(first, row), logprobs(plain, row))


def test_only_the_adapter_is_trained(folder: Path, family: Family) -> None:
    policy = load_policy_model(model_config(folder, family))
    add_old_policy(policy.model)
    trained = {id(p) for p in policy.parameters() if p.requires_grad}
    assert trained == {id(p) for p in adapter_parameters(policy.model)}
    for weight_decay in (0.0, 0.1):  # no norm is trained: a group would be empty
        groups = parameter_groups(trained_parameters(policy), weight_decay)
        assert [g["weight_decay"] for g in groups] == [weight_decay]
        assert {id(p) for g in groups for p in g["params"]} == trained


@pytest.mark.parametrize("target", ["w1", "lm_head", "embed_tokens", "q_norm", "self_attn"])
def test_what_is_no_linear_layer_is_refused(qwen3: Path, target: str) -> None:
    lora = LoraConfig(target_modules=["q_proj", target])
    expected = rf"model\.lora\.target_modules: {target}: .* there are q_proj, k_proj, v_proj"
    with pytest.raises(ConfigError, match=expected):
        load_policy_model(model_config(qwen3, lora=lora))


def test_fused_experts_are_refused(folders: dict[Family, Path]) -> None:
    config = model_config(folders["qwen3_moe"], lora=LoraConfig())
    expected = "gate_proj, up_proj, down_proj: .* o_proj; the experts are fused"
    with pytest.raises(ConfigError, match=expected):
        load_policy_model(config)


def test_a_target_may_name_one_layer(qwen3: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=["layers.1.self_attn.q_proj"])
    policy = load_policy_model(model_config(qwen3, lora=lora))
    names = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    assert len(names) == 2 and all("layers.1.self_attn.q_proj.lora_" in n for n in names)


def test_an_offloaded_reference_is_refused() -> None:
    settings = {
        "model": {"path": "model", "lora": {}},
        "data": {"files": ["prompts.jsonl"]},
        "inference": {"endpoints": ["http://127.0.0.1:1"]},
        "rewards": [{"name": "exact"}],
        "recipe": {"kl_coef": 0.1},
    }
    validate_config(settings)
    with pytest.raises(ConfigError, match=r"trainer\.offload_reference: .* model\.lora"):
        validate_config(settings | {"trainer": {"offload_reference": True}})


# ---- gradients and frozen models -----------------------------------------------------------------


@pytest.mark.parametrize(
    "family, checkpointing, same_pass",
    [
        ("llama", "none", True),
        ("qwen2", "layer", False),
        ("qwen3", "selective", True),
        ("qwen3_moe", "layer", True),
    ],
)
def test_gradient_is_pefts_in_fp64(
    folders: dict[Family, Path], family: Family, checkpointing: str, same_pass: bool
) -> None:
    """Packed rows against each sequence alone, with the adapter-off reference in the loss."""
    folder = folders[family]
    config = model_config(folder, family, activation_checkpointing=checkpointing)
    policy = load(config, folder / "adapter", torch.float64)
    reference = frozen_adapter(policy, policy, None)
    tri_model = TriModel(
        policy, reference=reference, old_policy=None, temperature=TEMPERATURE, device=CPU
    )
    for row in streamed("token"):
        loss_sum, _ = tri_model.loss(row, OBJECTIVE, same_pass=same_pass)
        (loss_sum / denominator("token")).backward()
    gold = dense_gold(folder, 1e9)
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)
    names = dict(adapter_weights(policy.model, is_writer=True))
    gradients = [p.grad for p in adapter_parameters(policy.model)]
    got = dict(zip(names, gradients, strict=True))
    # norms are computed in fp32 (Hugging Face casts), advantages and weights are fp32
    assert relative_error(got, gold.gradients) < 3e-6


def test_reference_is_the_model_before_any_adapter(folder: Path, family: Family) -> None:
    policy = load(model_config(folder, family), folder / "adapter")
    row = streamed("token")[0]
    with_adapter = logprobs(policy, row)
    plain = load_policy_model(ModelConfig(path=folder / "base", dtype="fp32"))
    assert torch.equal(of_frozen(policy, row, None), logprobs(plain, row))
    assert torch.equal(logprobs(policy, row), with_adapter)  # it is on again
    assert float((with_adapter - logprobs(plain, row)).abs().max()) > 0.1


def test_old_policy_keeps_its_values(qwen3: Path) -> None:
    policy = load(model_config(qwen3), qwen3 / "adapter")
    add_old_policy(policy.model)
    row = streamed("token")[0]
    before = logprobs(policy, row)
    assert torch.equal(of_frozen(policy, row, OLD_POLICY), before)
    with torch.no_grad():
        for parameter in adapter_parameters(policy.model):
            parameter.mul_(1.5)
    assert torch.equal(of_frozen(policy, row, OLD_POLICY), before)
    assert float((logprobs(policy, row) - before).abs().max()) > 0.1


@pytest.mark.parametrize("adapter", [None, OLD_POLICY])
def test_an_exception_leaves_the_adapter_on_and_trained(
    qwen3: Path, adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load(model_config(qwen3), qwen3 / "adapter")
    add_old_policy(policy.model)
    row = streamed("token")[0]
    before = logprobs(policy, row)
    trained = [p.requires_grad for p in policy.parameters()]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(policy, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            of_frozen(policy, row, adapter)
    assert torch.equal(logprobs(policy, row), before)
    assert [p.requires_grad for p in policy.parameters()] == trained


# ---- weights -------------------------------------------------------------------------------------


def merged_by_peft(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    model.merge_and_unload().save_pretrained(target)
    return load_file(target / "model.safetensors")


def test_streamed_weights_are_those_that_peft_merges(
    folder: Path, family: Family, tmp_path: Path
) -> None:
    """By the names of the plain model's file; also a tied head, biases and per-expert names."""
    expected = merged_by_peft(folder, tmp_path)
    policy = load(model_config(folder, family), folder / "adapter")
    add_old_policy(policy.model)  # which is no part of what is served
    got = dict(saved_weights(policy.model, is_writer=True))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    base = load_file(folder / "base/model.safetensors")
    changed = {n.split(".")[-2] for n in got if not torch.equal(got[n], base[n])}
    assert changed == set(lora_of(family).target_modules)


def test_merged_weights_are_rounded_once(qwen3: Path) -> None:
    """bf16: no weight is further from the fp64 sum than half a unit in the last place."""
    policy = load(model_config(qwen3, dtype="bf16"), qwen3 / "adapter")
    got = dict(saved_weights(policy.model, is_writer=True))
    base = load_file(qwen3 / "base/model.safetensors")
    adapter = dict(adapter_weights(policy.model, is_writer=True))
    assert all(weight.dtype == torch.bfloat16 for weight in (*got.values(), *adapter.values()))
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    weight, delta = base[f"{name}.weight"].bfloat16(), b @ a * (LORA.alpha / LORA.rank)
    exact = weight.double() + delta
    half_unit = torch.exp2(exact.frexp().exponent.double() - 9)

    def furthest(merged: torch.Tensor) -> float:
        return float(((merged.double() - exact).abs() / half_unit).max())

    assert furthest(got[f"{name}.weight"]) < 1.001  # the sum itself is fp32
    assert furthest(weight + delta.bfloat16()) > 1.5  # rounding twice would be seen


def test_other_ranks_get_names_and_shapes(qwen3: Path) -> None:
    policy = load(model_config(qwen3), qwen3 / "adapter")
    for stream in (saved_weights, adapter_weights):
        written = dict(stream(policy.model, is_writer=True))
        others = dict(stream(policy.model, is_writer=False))
        assert {n: t.shape for n, t in others.items()} == {n: t.shape for n, t in written.items()}
        assert {t.device.type for t in others.values()} == {"meta"}


def test_exports_load_without_us(folder: Path, family: Family, tmp_path: Path) -> None:
    policy = load(model_config(folder, family), folder / "adapter")
    base, lora = folder / "base", lora_of(family)
    weights = saved_weights(policy.model, is_writer=True)
    export_model(weights, base, base, tmp_path / "model", "float32")
    adapter = adapter_weights(policy.model, is_writer=True)
    export_adapter(adapter, lora, base, tmp_path / "adapter")
    ids = torch.randint(1, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    original, exported = (
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
        for path in (folder / "adapter", tmp_path / "adapter")
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected, from_adapter, from_merged = (
            m(ids).logits.log_softmax(-1) for m in (original, exported, merged)
        )
    assert torch.equal(from_adapter, expected)
    torch.testing.assert_close(from_merged, expected, rtol=0, atol=2e-5)
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == str(
        base
    )
