"""The cost model, against what torch counts in a Hugging Face model and against the layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from easyrl.dataloaders.packing.cost import DEFAULT_COST, RowCost, cost_of_model_at, model_cost
from easyrl.kernels.attention.segment_layout import SegmentLayout
from tests.dataloaders.packed_rows import pack
from tests.tiny_models import Family, random_group, tiny_config, tiny_model


def counted(family: Family, num_tokens: int) -> int:
    """Floating-point operations of matrix products in a forward pass, full attention matrices."""
    model = tiny_model(family, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, num_tokens, dtype=torch.long))
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_cost_is_what_torch_counts(family: Family) -> None:
    """A plain forward pass computes all T² pairs and projects all T tokens to the vocabulary."""
    cost = model_cost(tiny_config(family).to_dict())
    for num_tokens in (8, 21):
        whole = num_tokens * (cost.per_token + cost.per_label) + num_tokens**2 * cost.per_pair
        assert counted(family, num_tokens) == whole


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    config = tiny_config("qwen3_moe", mlp_only_layers=[])
    model = tiny_model("qwen3_moe", mlp_only_layers=[])
    used = config.num_experts_per_tok / config.num_experts
    numel = 0.0
    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim > 1 and "mlp.gate.weight" not in name:  # the router is left out
            numel += parameter.numel() * (used if "experts" in name else 1.0)
    assert model_cost(config.to_dict()).per_token == 2 * numel


def test_row_costs_add_up() -> None:
    """A prompt and what comes behind it, against the row's tokens and the layout's pairs."""
    cost = RowCost(per_token=3.0, per_pair=0.5, per_label=7.0)
    (row,) = pack([random_group(np.random.default_rng(0), 6, [4, 9, 1])])
    lengths = np.array([4, 9, 1])
    prompt = cost.tokens(np.array(0), np.array(6))
    total = (
        prompt + cost.tokens(np.full(3, 6), 6 + lengths).sum() + (cost.per_label * lengths).sum()
    )
    layout = SegmentLayout(row.segments)
    assert total == 3.0 * 20 + 0.5 * layout.num_pairs + 7.0 * 14


@pytest.mark.parametrize("hidden_size", [None, [8, 8], {}, "8"])
def test_sizes_that_are_no_numbers(tmp_path: Path, hidden_size: object) -> None:
    shape = {**tiny_config("qwen3").to_dict(), "hidden_size": hidden_size}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert cost_of_model_at(tmp_path) == DEFAULT_COST


def test_cost_of_a_folder(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.save_pretrained(tmp_path)
    assert cost_of_model_at(tmp_path) == model_cost(config.to_dict()) != DEFAULT_COST
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert cost_of_model_at(tmp_path) == DEFAULT_COST == cost_of_model_at(tmp_path / "nowhere")
