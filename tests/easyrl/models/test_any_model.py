"""Models of other families give what plain Hugging Face gives, on packed and on padded rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from easyrl.config import ConfigError, LoraConfig, ModelConfig
from easyrl.dataloaders.packing.groups import Packing
from easyrl.engines.weight_names import saved_weights
from easyrl.models import row_check
from easyrl.models.fused_layers import is_rms_norm, is_rotary, is_swiglu
from easyrl.models.loading import load_policy_model
from easyrl.models.lora import adapter_layers, factors
from easyrl.models.output_head import LogitShape
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from easyrl.models.row_check import RowVerdict, row_verdict
from tests.any_models import NOT_PACKED, PACKED, any_model, save_any_model
from tests.easyrl.models.test_policy_model import (
    ENTROPY_WEIGHT,
    TEMPERATURE,
    make_groups,
    relative_errors,
    separate_run,
)
from tests.recipes import pack_groups

BOUND = 1e-10  # relative; measured 1e-15 to 1e-13


@pytest.fixture
def no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modeling files' casts of fp64 to fp32 do nothing, on our side and on the plain one."""
    float_, to, softmax = Tensor.float, Tensor.to, nn.functional.softmax

    def stays(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else float_(tensor)

    def stays_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(a for a in args if a is not torch.float32)
            kwargs = {k: v for k, v in kwargs.items() if v is not torch.float32}
            if not args and not kwargs:
                return tensor
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "float", stays)
    monkeypatch.setattr(Tensor, "to", stays_to)
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, **_: softmax(x, dim=dim))


def run(model: PolicyModel, packing: Packing, budget: int) -> tuple[Tensor, dict[str, Tensor]]:
    """As ``separate_run``, of rows."""
    groups, advantages = make_groups()
    rows = pack_groups(
        groups,
        advantages,
        aggregation="sequence",
        max_tokens=64,
        mask_truncated=False,
        max_tokens_per_micro_batch=budget,
        packing=packing,
    )
    model.zero_grad()
    logprobs = {}
    for row in rows:
        row_logprobs, row_entropy = run_micro_batch(model, row, TEMPERATURE)
        factors = row.advantages.to(row_logprobs.dtype)
        (factors * row_logprobs + ENTROPY_WEIGHT * row_entropy).sum().backward()
        for place, key in enumerate(row.sequences):
            logprobs[key] = row_logprobs.detach()[row.sequence_index == place]
    gradients = {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return torch.cat([logprobs[key] for key in sorted(logprobs)]), gradients  # type: ignore[return-value]


def load(path: Path, attention: str, dtype: torch.dtype = torch.float64) -> PolicyModel:
    config = ModelConfig.model_validate(
        {"path": path, "attention": attention, "logprob_chunk_size": 16, "dtype": "fp32"}
    )
    return load_policy_model(config, dtype=dtype)


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


@pytest.mark.parametrize("name", PACKED)
def test_packed_families_are_exact_with_every_packing(
    name: str, tmp_path: Path, no_casts: None
) -> None:
    path = save_any_model(tmp_path, name)
    expected = separate_run(plain(path))
    policy = load(path, "merged")
    for packing in ("prompt", "tree", "none"):
        for budget in (200, 60):
            errors = relative_errors(run(policy, packing, budget), expected)
            assert max(errors) < BOUND, (packing, budget, errors)


@pytest.mark.parametrize("name", [*PACKED[:2], *NOT_PACKED])
def test_own_attention_on_padded_rows_is_exact(name: str, tmp_path: Path, no_casts: None) -> None:
    path = save_any_model(tmp_path, name)
    expected = separate_run(plain(path))
    policy = load(path, "own")
    for budget in (200, 60):
        errors = relative_errors(run(policy, "padded", budget), expected)
        assert max(errors) < BOUND, (budget, errors)


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_what_cannot_run_packed_is_refused_by_key(name: str, tmp_path: Path) -> None:
    path = save_any_model(tmp_path, name)
    with pytest.raises(ConfigError, match=r"model\.attention: .*set model\.attention=own and tra"):
        load(path, "auto")


def test_a_window_shorter_than_a_row_s_sequences_is_not_run(tmp_path: Path) -> None:
    policy = load(save_any_model(tmp_path, "short_windows"), "reference")
    with pytest.raises(ValueError, match="longer than its sliding window of 8"):
        run(policy, "none", 200)


def test_shared_rows_do_not_become_a_padded_batch(tmp_path: Path) -> None:
    policy = load(save_any_model(tmp_path, "bloom"), "own")
    with pytest.raises(ValueError, match=r"set trainer\.packing=none"):
        run(policy, "prompt", 200)


def test_a_head_that_is_not_understood_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_any_model(tmp_path, "granite")
    monkeypatch.setattr(LogitShape, "of", classmethod(lambda cls, config: cls()))
    row_check._verdict.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"model\.path: .*log-probabilities of a small copy"):
            load(path, "auto")
    finally:
        row_check._verdict.cache_clear()


@pytest.mark.parametrize("name", [*PACKED, *NOT_PACKED])
def test_verdicts(name: str) -> None:
    """Windows are a matter of the run's lengths, not of the verdict."""
    packs = name not in ("gemma2", "bloom")
    verdict = row_verdict(any_model(name).config)
    assert (verdict.packed is None, verdict.padded) == (packs, None)
    assert isinstance(verdict, RowVerdict)


@pytest.mark.parametrize("attention", ["reference", "own"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),  # 0.1 each, by default
        ("mistral", {"attention_dropout": 0.5}),
        ("phi", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3}),
    ],
)
def test_training_mode_computes_what_evaluation_does(
    name: str, settings: dict[str, float], attention: str, tmp_path: Path
) -> None:
    policy = load(save_any_model(tmp_path, name, **settings), attention, torch.float32)
    assert policy.training
    packing: Packing = "padded" if attention == "own" else "none"
    first, again = run(policy, packing, 200), run(policy, packing, 200)
    evaluated = run(policy.eval(), packing, 200)
    for other in (again, evaluated):
        assert torch.equal(first[0], other[0])
    noisy = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    tokens = torch.arange(1, 40)[None]
    assert not torch.equal(noisy(tokens).logits, noisy(tokens).logits)  # without us it is noise


def test_fused_layers_are_known_by_what_they_compute() -> None:
    def modules(name: str, ending: str) -> list[Any]:
        return [m for m in any_model(name).modules() if type(m).__name__.endswith(ending)]

    assert all(map(is_rms_norm, modules("mistral", "RMSNorm")))
    assert not any(map(is_rms_norm, modules("gemma3", "RMSNorm")))  # (1 + weight) · x̂
    assert is_swiglu(modules("mistral", "MLP")[0])
    assert not is_swiglu(modules("phi", "MLP")[0])
    assert is_rotary(type(modules("mistral", "Attention")[0]).forward)
    assert not is_rotary(type(modules("cohere", "Attention")[0]).forward)  # turns neighbours


@pytest.mark.parametrize(
    ("name", "targets"),
    [("gpt2", ["c_attn", "c_proj"]), ("gemma3", ["q_proj", "down_proj"])],
)
def test_merged_adapters_are_saved_as_the_model_they_compute(
    name: str, targets: list[str], tmp_path: Path
) -> None:
    path = save_any_model(tmp_path / "model", name)
    config = ModelConfig(path=path, dtype="fp32", lora=LoraConfig(rank=3, target_modules=targets))
    policy = load_policy_model(config)
    with torch.no_grad():
        for layer in adapter_layers(policy.model).values():
            factors(layer)[1].normal_(std=0.3)
    weights = {n: w.clone() for n, w in saved_weights(policy.model, is_writer=True)}
    (tmp_path / "saved").mkdir()
    save_file(weights, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(path / "config.json", tmp_path / "saved")
    again, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    groups, advantages = make_groups()
    (row, *_) = pack_groups(
        groups,
        advantages,
        aggregation="sequence",
        max_tokens=64,
        mask_truncated=False,
        max_tokens_per_micro_batch=200,
        packing="none",
    )
    got = run_micro_batch(policy, row, 1.0)[0].detach()
    start, length, _ = row.segments[0]
    tokens = row.input_ids[start : start + length]
    logp = again(tokens[None]).logits[0].log_softmax(-1).detach()
    first = row.sequence_index == 0
    expected = logp[row.predictor_index[first]].gather(1, row.label_ids[first][:, None])[:, 0]
    torch.testing.assert_close(got[first], expected, rtol=1e-4, atol=1e-4)
    base = plain(path)(tokens[None]).logits[0].log_softmax(-1).detach().float()
    assert (base - logp).abs().max() > 0.05  # the adapter is felt
