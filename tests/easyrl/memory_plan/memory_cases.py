"""A model and a row that are large enough to count, and the configurations that are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.recipes.estimators import group_advantages
from easyrl.schema import MicroBatch
from tests.recipes import pack_groups
from tests.tiny_models import Family, random_group, save_tiny_model

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
# by name: family, and sizes that differ
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "tied": ("qwen3", {"tied": True}),
    "untied": ("qwen3", {}),
    "wide": ("llama", {"vocab_size": 32768, "num_hidden_layers": 2}),
    "mixture": ("qwen3_moe", MIXTURE | {"mlp_only_layers": []}),
}
PROMPT, RESPONSES = 64, [120] * 8  # tokens; none is longer than a block of attention
ROW_TOKENS = PROMPT + sum(RESPONSES)


def save_models(folder: Path) -> None:
    """Those of ``MODELS``, each in a folder of its name."""
    for name, (family, own) in MODELS.items():
        save_tiny_model(folder / name, family, **(SIZES | own))


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    """Of the model at ``folder``, with values of sections over those that all have."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "attention": "merged", "fused_layers": "none"},
        "data": {"files": [str(folder / "prompts.jsonl")], "max_prompt_tokens": PROMPT},
        "rollout": {"max_tokens": 120},
        "inference": {"endpoints": ["http://127.0.0.1:1"]},
        "recipe": {"aggregation": "token", "kl_coef": 0.0},
        "trainer": {"max_tokens_per_micro_batch": ROW_TOKENS},
    }
    for name, values in sections.items():
        is_other_recipe = name == "recipe" and "name" in values
        tree[name] = values if is_other_recipe else tree.get(name, {}) | values
    return validate_config(tree | {"rewards": [{"name": "exact"}]})


def row() -> MicroBatch:
    """Of ``ROW_TOKENS``: a prompt and eight responses, each token of which is trained."""
    group = random_group(np.random.default_rng(5), PROMPT, RESPONSES)
    (only,) = pack_groups(
        [group],
        [group_advantages(group.rewards, "group_std")],
        aggregation="token",
        max_tokens=120,
        mask_truncated=False,
        max_tokens_per_micro_batch=ROW_TOKENS,
    )
    assert only.num_tokens == ROW_TOKENS
    return only
