"""Packed rows give what plain Hugging Face gives for each sequence alone, on all families."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from easyrl.config import ModelConfig
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.models.row_forward import PackedForward
from easyrl.models.supported import model_notices
from easyrl.schema import MicroBatch, RolloutGroup, SampleKey
from tests.kernels.memory_recorder import PeakMemory
from tests.recipes import pack_groups
from tests.tiny_models import CLASSES, FAMILIES, Family, random_group, save_tiny_model, tiny_config

NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm)
TEMPERATURE = 0.7
ENTROPY_WEIGHT = 0.3  # the test objective is Σ a·logprob + 0.3·entropy, a the sequence's advantage
# 143 tokens: one row with budget 200; several rows, with groups split, with budget 40.
GROUP_SHAPES = ((11, [5, 17, 1, 9]), (3, [30, 2]), (20, [8, 8, 29]))
Shapes = tuple[tuple[int, list[int]], ...]  # of each group: tokens of its prompt, of its responses


def make_groups(shapes: Shapes = GROUP_SHAPES) -> tuple[list[RolloutGroup], list[np.ndarray]]:
    rng = np.random.default_rng(5)
    groups = [
        random_group(rng, prompt, responses, index=index)
        for index, (prompt, responses) in enumerate(shapes)
    ]
    return groups, [rng.normal(size=len(g.completions)) for g in groups]


def pack(budget: int, shapes: Shapes = GROUP_SHAPES) -> list[MicroBatch]:
    groups, advantages = make_groups(shapes)
    return pack_groups(
        groups,
        advantages,
        aggregation="token",
        max_tokens=64,
        mask_truncated=False,
        max_tokens_per_micro_batch=budget,
    )


def packed_run(
    model: PolicyModel, budget: int, shapes: Shapes = GROUP_SHAPES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all response tokens and gradients of the test objective, packed."""
    model.zero_grad()
    logprobs: dict[SampleKey, Tensor] = {}  # a group's parts are not in order
    for row in pack(budget, shapes):
        row_logprobs, row_entropy = run_micro_batch(model, row, TEMPERATURE)
        advantages = row.advantages.to(row_logprobs.dtype)
        (advantages * row_logprobs + ENTROPY_WEIGHT * row_entropy).sum().backward()
        for place, key in enumerate(row.sequences):
            logprobs[key] = row_logprobs.detach()[row.sequence_index == place]
    prefix = "model."
    return torch.cat([logprobs[key] for key in sorted(logprobs)]), {
        name.removeprefix(prefix): parameter.grad for name, parameter in model.named_parameters()
    }


def separate_run(
    model: PreTrainedModel, shapes: Shapes = GROUP_SHAPES
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same of a plain Hugging Face model, each sequence on its own without padding."""
    model.zero_grad()
    logprobs = []
    groups, advantages = make_groups(shapes)
    for group, group_advantages in zip(groups, advantages, strict=True):
        prompt = torch.from_numpy(group.prompt.token_ids).long()
        for completion, advantage in zip(group.completions, group_advantages, strict=True):
            response = torch.from_numpy(completion.token_ids).long()
            logits = model(torch.cat((prompt, response))[None]).logits[0]
            logp = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            picked = logp.gather(1, response[:, None]).squeeze(1)
            entropy = -(logp.exp() * logp).sum(-1)
            (float(np.float32(advantage)) * picked + ENTROPY_WEIGHT * entropy).sum().backward()
            logprobs.append(picked.detach())
    return torch.cat(logprobs), {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def relative_errors(
    got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, float]:
    """‖difference‖ / ‖expected‖: of the log-probabilities, and the worst gradient's."""
    assert got[1].keys() == expected[1].keys()
    gradients = [
        float((got[1][name] - gradient).norm() / gradient.norm())
        for name, gradient in expected[1].items()
    ]
    return float((got[0] - expected[0]).norm() / expected[0].norm()), max(gradients)


def load_both(
    path: Path, dtype: torch.dtype, attention: str = "sdpa"
) -> tuple[PolicyModel, PreTrainedModel]:
    # these rows are so short that auto would take the reference
    config = ModelConfig(path=path, logprob_chunk_size=16, attention="merged")
    policy = load_policy_model(config, dtype=dtype)
    experts = "eager" if dtype == torch.float64 else None
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, experts_implementation=experts
    )
    return policy, plain


@pytest.fixture
def no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the stock models' casts to fp32 away: RMSNorm's and the MoE router's softmax.

    The rotary tables are computed in fp32 too, but from the position alone, so they are equal on
    both sides.
    """

    def norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    for norm_class in NORMS:
        monkeypatch.setattr(norm_class, "forward", norm)
    monkeypatch.setattr(
        nn.functional, "softmax", lambda logits, dim, dtype=None: torch.softmax(logits, dim)
    )


@pytest.fixture(params=[f"{family}-{tied}" for family in FAMILIES for tied in ("tied", "untied")])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, _, tied = request.param.partition("-")
    return save_tiny_model(tmp_path, family, tied=tied == "tied")


def test_rows_are_what_the_comparisons_are_about() -> None:
    """Several groups in one row; and rows with parts of a group, one of them over the budget."""
    (row,) = pack(200)
    assert [segment.parent for segment in row.segments].count(-1) == 3
    rows = pack(40)
    assert sum(segment.parent == -1 for row in rows for segment in row.segments) > 3
    assert max(row.num_tokens for row in rows) > 40


@pytest.mark.parametrize("budget", [200, 40])
def test_exact_in_fp64_without_casts(path: Path, no_casts: None, budget: int) -> None:
    policy, plain = load_both(path, torch.float64)
    errors = relative_errors(packed_run(policy, budget), separate_run(plain))
    assert max(errors) < 1e-9, errors  # the bound; measured 1e-15 to 1e-14


def test_stock_model_in_fp64(path: Path) -> None:
    policy, plain = load_both(path, torch.float64)
    errors = relative_errors(packed_run(policy, 200), separate_run(plain))
    assert max(errors) < 1e-6, errors  # RMSNorm rounds to fp32 on both sides


def test_stock_model_in_fp32(path: Path) -> None:
    policy, plain = load_both(path, torch.float32, attention="eager")
    errors = relative_errors(packed_run(policy, 200), separate_run(plain))
    assert max(errors) < 1e-5, errors


def test_plain_causal_mask_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a wrong mask: responses that see each other are far off."""
    policy, plain = load_both(path, torch.float64)
    monkeypatch.setattr(
        SegmentLayout,
        "dense_mask",
        lambda self, device: torch.ones(self.num_tokens, self.num_tokens, dtype=torch.bool).tril(),
    )
    with pytest.raises(RuntimeError, match="merged .* does not agree with the reference"):
        packed_run(policy, 200)
    policy.row_forward = PackedForward(CheckedAttention("reference"))
    errors = relative_errors(packed_run(policy, 200), separate_run(plain))
    assert min(errors) > 1e-2, errors


def test_positions_matter(tmp_path: Path) -> None:
    """The comparison sees responses whose positions do not continue from the prompt's end."""
    policy, plain = load_both(save_tiny_model(tmp_path, "qwen3"), torch.float64)
    row = pack(200)[0]
    logprobs, _ = run_micro_batch(policy, row, TEMPERATURE)
    row.position_ids.copy_(torch.arange(row.num_tokens))
    moved, _ = run_micro_batch(policy, row, TEMPERATURE)
    expected, _ = separate_run(plain)
    # the model's own norms round to float32 in between
    assert (logprobs - expected).abs().max() < 1e-5 < 1e-2 < (moved - expected).abs().max()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, family: Family) -> None:
    path = save_tiny_model(tmp_path, family)
    counts, kept, runs = {}, {}, {}
    for mode, every in (("none", 1), ("layer", 1), ("layer", 2), ("selective", 1)):
        config = ModelConfig(
            path=path, activation_checkpointing=mode, checkpoint_every=every, attention="merged"
        )
        model = load_policy_model(config, dtype=torch.float64)
        calls = [0] * len(model.model.model.layers)
        for index, layer in enumerate(model.model.model.layers):
            layer.self_attn.register_forward_hook(partial(_count, calls, index))
        runs[mode, every] = packed_run(model, 200)
        counts[mode, every] = list(calls)
        kept[mode, every] = _kept_for_backward(model)
    assert counts == {  # runs of each layer: forward, and again in the backward pass
        ("none", 1): [1, 1],
        ("layer", 1): [2, 2],
        ("layer", 2): [2, 1],
        ("selective", 1): [2, 2],
    }
    assert kept["layer", 1] < kept["layer", 2] < kept["none", 1]
    assert kept["layer", 1] < kept["selective", 1] < kept["none", 1]
    plain = runs.pop(("none", 1))
    for run in runs.values():
        assert torch.equal(run[0], plain[0])
        for name, gradient in run[1].items():
            assert torch.equal(gradient, plain[1][name]), name


def _count(calls: list[int], index: int, *_: object) -> None:
    calls[index] += 1


def _kept_for_backward(model: PolicyModel) -> int:
    """Elements that a forward leaves, whoever keeps them; the results themselves are few."""
    (row,) = pack(200)
    with PeakMemory(*model.parameters(), *model.buffers()) as memory:
        results = run_micro_batch(model, row, TEMPERATURE)
        gc.collect()
        kept = memory.alive
    del results
    return kept


@pytest.mark.parametrize(
    ("family", "products"),
    [
        ("qwen3", ("aten.mm.default",)),
        ("qwen3_moe", ("aten.mm.default", "aten._grouped_mm.default")),
    ],
)
def test_selective_checkpointing_keeps_products_and_attention(
    tmp_path: Path, family: Family, products: tuple[str, ...]
) -> None:
    """What is cheap is computed again, what is dear is not."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    path = save_tiny_model(tmp_path, family)
    counts = {}
    for mode in ("none", "layer", "selective"):
        model = load_policy_model(
            ModelConfig(path=path, activation_checkpointing=mode), dtype=torch.float32
        )
        with Counted() as counted:
            packed_run(model, 200)
        counts[mode] = counted.counts
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    cheap = "aten.silu.default"
    for dear in (*products, attention):
        assert 0 < counts["selective"][dear] == counts["none"][dear] < counts["layer"][dear]
    assert counts["none"][cheap] < counts["selective"][cheap] == counts["layer"][cheap]


@pytest.mark.parametrize("attention", ["merged", "flex"])
def test_selective_checkpointing_with_other_operations_in_the_backward(
    tmp_path: Path, attention: str
) -> None:
    """ZeRO-3 gathers weights in a layer's backward that another layer had prefetched."""
    path = save_tiny_model(tmp_path, "qwen3")
    runs = []
    for mode in ("none", "selective"):
        config = ModelConfig(path=path, activation_checkpointing=mode, attention=attention)
        model = load_policy_model(config, dtype=torch.float32)
        calls = [0]
        for layer in model.model.model.layers[1:]:
            layer.mlp.register_forward_pre_hook(partial(_gather_again, calls))
        runs.append(packed_run(model, 200))
        assert calls == [1 if mode == "none" else 2]
    assert torch.equal(runs[0][0], runs[1][0])
    for name, gradient in runs[0][1].items():
        assert torch.equal(gradient, runs[1][1][name]), name


def _gather_again(calls: list[int], *_: object) -> None:
    calls[0] += 1
    if calls[0] == 2:
        torch.cat([torch.zeros(2), torch.ones(2)], out=torch.empty(4))


@pytest.mark.parametrize("tied", [True, False])
def test_head_shares_the_weight_and_names_stay(tmp_path: Path, tied: bool) -> None:
    path = save_tiny_model(tmp_path, "qwen3", tied=tied)
    policy, plain = load_both(path, torch.float32)
    names = [name.removeprefix("model.") for name, _ in policy.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    state = {name.removeprefix("model."): value for name, value in policy.state_dict().items()}
    assert state.keys() == plain.state_dict().keys()
    head, embedding = policy.model.lm_head, policy.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    policy.model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_dummy_row_has_gradients_of_zero(tmp_path: Path) -> None:
    policy, _ = load_both(save_tiny_model(tmp_path, "qwen3_moe"), torch.float32)
    row = dummy_micro_batch()
    logprobs, _ = run_micro_batch(policy, row, 1.0)
    (row.loss_weights * logprobs).sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_runs_in_bf16(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    policy = load_policy_model(ModelConfig(path=path))
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    logprobs, entropy = run_micro_batch(policy, pack(200)[0], 1.0)
    exact = load_policy_model(ModelConfig(path=path, dtype="fp32"))
    expected, _ = run_micro_batch(exact, pack(200)[0], 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    # bf16 keeps 8 bits; measured 0.01 on average, log-probabilities being around -6
    assert 0 < (logprobs - expected).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("family", "overrides", "named"),
    [
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "quantization_config in its config.json, fp8.*use the bf16 checkpoint",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised.*gptq.*dequantise",
        ),
        ("llama", {"quantization_config": {"load_in_4bit": True}}, "quantised checkpoint"),
        (
            "qwen3_moe",
            {"output_router_logits": True, "router_aux_loss_coef": 0.001},
            "auxiliary loss.*model.ignore_router_aux_loss=true",
        ),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, family: Family, overrides: dict[str, object], named: str
) -> None:
    config = tiny_config(family, **({"architectures": [CLASSES[family][1].__name__]} | overrides))
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named) as raised:
        load_policy_model(ModelConfig(path=tmp_path))
    assert "model.path" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        ({"output_router_logits": False, "router_aux_loss_coef": 0.001}, False),  # as published
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, False),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.001}, True),
    ],
)
def test_mixture_without_an_auxiliary_loss_is_trained(
    tmp_path: Path, overrides: dict[str, object], ignored: bool
) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe", **overrides)
    model = ModelConfig(path=path, ignore_router_aux_loss=ignored)
    assert ["left out" in notice for notice in model_notices(model)] == [True] * ignored
    policy = load_policy_model(model)
    logprobs, _ = run_micro_batch(policy, pack(200)[0], 1.0)
    assert torch.isfinite(logprobs).all()


def test_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random: a part of the download, or gptq without its key."""
    path = save_tiny_model(tmp_path, "qwen3")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.path: .*no weights for 1 .*layers.1.mlp.up_proj"):
        load_policy_model(ModelConfig(path=path))


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path: .*nowhere holds no Hugging Face model"):
        load_policy_model(ModelConfig(path=tmp_path / "nowhere"))
