"""A critic's values on packed rows are those of each sequence alone; its head comes and goes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from easyrl.config import ConfigError, LoraConfig, ModelConfig
from easyrl.engines.weight_names import saved_weights
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.critic import CriticModel, ValueHead, load_critic_model
from easyrl.schema import MicroBatch
from tests.recipes import pack_groups
from tests.tiny_models import FAMILIES, Family, random_group, save_tiny_model

LENGTHS = ((5, [4, 9, 1]), (3, [7, 2, 6]))


def rows(budget: int) -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    groups = [random_group(rng, p, r, index=i, masked=0.3) for i, (p, r) in enumerate(LENGTHS)]
    return pack_groups(
        groups,
        [np.zeros(3)] * 2,
        aggregation="token",
        max_tokens=16,
        mask_truncated=False,
        max_tokens_per_micro_batch=budget,
    )


def values_of(critic: CriticModel, row: MicroBatch) -> torch.Tensor:
    layout = SegmentLayout(row.segments)
    return critic(row.input_ids, row.position_ids, layout, row.predictor_index)


def with_head(folder: Path, head: torch.Tensor, *, keeps_projection: bool = True) -> Path:
    file = folder / "model.safetensors"
    weights = load_file(file)
    if not keeps_projection:
        weights.pop("lm_head.weight", None)
    save_file(weights | {"score.weight": head}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_each_sequence_alone(tmp_path: Path, family: Family) -> None:
    """Against plain transformers in fp64: the hidden state before each token, times the head."""
    folder = save_tiny_model(tmp_path / "model", family)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    critic = load_critic_model(ModelConfig(path=with_head(folder, head), dtype="fp32"))
    rng = np.random.default_rng(0)
    groups = [random_group(rng, p, r, index=i, masked=0.3) for i, (p, r) in enumerate(LENGTHS)]
    for row in [*rows(100), *rows(12)]:
        values = values_of(critic, row)
        for place, key in enumerate(row.sequences):
            group = groups[key.prompt]
            completion = group.completions[key.sample]
            ids = np.concatenate([group.prompt.token_ids, completion.token_ids]).astype(np.int64)
            hidden = plain.base_model(torch.from_numpy(ids)[None]).last_hidden_state[0]
            states = hidden[len(group.prompt.token_ids) - 1 : -1]
            expected = (states @ head.double().T).squeeze(-1)[completion.loss_mask]
            got = values[row.sequence_index == place].double()
            # fp32; measured 1e-6
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_language_model_s_values_begin_at_zero_and_its_head_can_learn(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    critic = load_critic_model(ModelConfig(path=folder, dtype="fp32"))
    (row,) = rows(100)
    values = values_of(critic, row)
    assert values.dtype == torch.float32 and not values.any()
    values.sum().backward()
    assert critic.head.weight.grad is not None and critic.head.weight.grad.any()
    names = {name for name, _ in critic.named_parameters()}
    assert "model.lm_head.weight" in names and critic.head.weight.shape == (1, 32)


def test_values_of_a_bf16_critic_are_float32() -> None:
    head = ValueHead(8, torch.bfloat16)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = head(hidden)
    assert values.dtype == torch.float32
    expected = (hidden.double() @ head.weight.double().T).squeeze(-1)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_of_a_critic_loads_again(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=tied)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    first = load_critic_model(ModelConfig(path=with_head(folder, head), dtype="fp32"))
    written = {n: t.clone() for n, t in saved_weights(first.model, is_writer=True)}
    assert written["lm_head.weight"].equal(head)
    again = with_head(
        save_tiny_model(tmp_path / "again", "qwen3", tied=tied, seed=3), head,
        keeps_projection=False,
    )  # fmt: skip
    weights = {n: t for n, t in written.items() if n != "lm_head.weight"} | {"score.weight": head}
    save_file(weights, again / "model.safetensors", metadata={"format": "pt"})
    second = load_critic_model(ModelConfig(path=again, dtype="fp32"))
    for row in rows(100):
        assert values_of(first, row).equal(values_of(second, row))


def test_with_adapters_only_these_and_the_head_are_trained(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    critic = load_critic_model(ModelConfig(path=folder, dtype="fp32", lora=LoraConfig(rank=2)))
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert "model.lm_head.weight" in trained
    assert all("lora_" in name or name == "model.lm_head.weight" for name in trained)


def test_what_is_no_critic_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.path: .* has no model.safetensors"):
        load_critic_model(ModelConfig(path=tmp_path, dtype="fp32"))
    folder = with_head(save_tiny_model(tmp_path / "model", "qwen3"), torch.zeros(2, 32))
    with pytest.raises(ConfigError, match=r"critic\.path: .*score.weight of shape \[2, 32\]"):
        load_critic_model(ModelConfig(path=folder, dtype="fp32"))
    lacks = save_tiny_model(tmp_path / "lacks", "qwen3")
    weights = load_file(lacks / "model.safetensors")
    del weights["lm_head.weight"]  # and no head for values
    save_file(weights, lacks / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"critic\.path: .* has no weights for 1 parameters"):
        load_critic_model(ModelConfig(path=lacks, dtype="fp32"))
