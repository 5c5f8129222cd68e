"""A model's fused layers: they are where the plain ones were, and give the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easyrl.config import ModelConfig
from easyrl.kernels.layers import layer_check, plain
from easyrl.models.loading import load_policy_model
from easyrl.models.policy_model import PolicyModel, run_micro_batch
from tests.easyrl.models.test_policy_model import pack
from tests.kernels.counted_layers import LAYERS, counted_backend
from tests.tiny_models import FAMILIES, Family, save_tiny_model

NORMS = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 4, "qwen3_moe": 4}  # of a decoder layer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a backend that ``auto`` takes on a CPU, whose numbers are the plain layers'."""
    found: list[str] = counted_backend(monkeypatch).calls
    return found


def results(model: PolicyModel) -> list[Tensor]:
    """Log-probabilities and gradients of one row."""
    (row,) = pack(budget=200)
    logprobs, entropy = run_micro_batch(model, row, 0.7)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [logprobs.detach(), *grads]


def load(folder: Path, **settings: Any) -> PolicyModel:
    return load_policy_model(ModelConfig(path=folder, dtype="fp32", **settings))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_to_the_bit(
    family: Family, checkpointing: Any, tmp_path: Path, calls: list[str]
) -> None:
    save_tiny_model(tmp_path, family)
    expected = results(load(tmp_path, fused_layers="none"))
    assert not calls
    model = load(tmp_path, fused_layers="auto", activation_checkpointing=checkpointing)
    got = results(model)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    if checkpointing == "none":
        layers = model.model.config.num_hidden_layers
        linear = Counter(
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        )
        norms = layers * NORMS[family] + 1  # the last is the model's
        checks = Counter(rms_norm=2 if NORMS[family] == 4 else 1, rotary=1, swiglu=1)  # by size
        # of a mixture's experts, which are one fused tensor, none
        assert linear["q_proj"] == layers and linear["down_proj"] > 0
        in_model = Counter(rms_norm=norms, rotary=layers, swiglu=linear["down_proj"])
        assert Counter(calls) == checks + in_model


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_backend_for_the_device_the_models_own_run(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, family)
    expected = results(load(tmp_path, fused_layers="none"))
    monkeypatch.delitem(layer_check.OF_DEVICE, "cpu")
    for layer in LAYERS:
        monkeypatch.setattr(plain, layer, None)  # nothing of ours is called
    got = results(load(tmp_path, fused_layers="auto"))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_a_cpu_are_the_models_own(family: Family, tmp_path: Path) -> None:
    """Up to rounding, in what is told and in each gradient."""
    save_tiny_model(tmp_path, family)
    expected = results(load(tmp_path, fused_layers="none"))
    got = results(load(tmp_path, fused_layers="cpu"))
    assert not all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    for own, right in zip(got, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


def test_another_model_of_the_process_keeps_its_own(tmp_path: Path, calls: list[str]) -> None:
    save_tiny_model(tmp_path, "qwen3")
    load(tmp_path, fused_layers="auto")
    results(load(tmp_path, fused_layers="none"))
    assert not calls
