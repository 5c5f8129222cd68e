"""Recipes and run settings for tests, and groups packed as a recipe has them packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from easyrl.build.recipe import response_rows
from easyrl.dataloaders.packing.groups import pack_groups as pack_trained_groups
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.recipes import GRPO, Recipe, RunSettings
from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.groups import (
    group_statistics,
    trained_group,
    trained_groups,
    without_advantages,
)
from easyrl.schema import MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import GroupFunctions

# by recipe: keys that it has to be given, as it would be in a file
REQUIRED: dict[str, dict[str, Any]] = {"distillation": {"teacher": "models/teacher"}}


def token_grpo(**settings: Any) -> GRPO:
    """GRPO with a mean over tokens and without KL, but for ``settings``."""
    return GRPO(**({"aggregation": "token", "kl_coef": 0.0} | settings))


def run_settings(max_tokens: int = 16, num_generations: int = 4) -> RunSettings:
    return RunSettings(max_tokens, num_generations, temperature=1.0, seed=0)


def pack_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    mask_truncated: bool,
    **packing: Any,
) -> list[MicroBatch]:
    """Rows of ``groups`` with the weights of an aggregation; ``packing`` as for ``pack_groups``."""
    recipe = token_grpo(aggregation=aggregation, mask_truncated=mask_truncated)
    run = run_settings(max_tokens)
    pairs = zip(groups, advantages, strict=True)
    return pack_trained_groups([trained_group(recipe, *pair, run) for pair in pairs], **packing)


def batch_denominator(
    groups: Sequence[RolloutGroup], aggregation: Aggregation, mask_truncated: bool
) -> float:
    """What divides the summed loss of ``groups`` with an aggregation."""
    recipe = token_grpo(aggregation=aggregation, mask_truncated=mask_truncated)
    return recipe.denominator(groups, run_settings())


def group_functions(
    recipe: Recipe | None = None, run: RunSettings | None = None, **packing: Any
) -> GroupFunctions:
    """What the trainer makes of finished groups with ``recipe``."""
    recipe, run = recipe or token_grpo(advantage="group_mean"), run or run_settings()
    pack = partial(pack_trained_groups, **({"whole_groups": recipe.span == "group"} | packing))
    return GroupFunctions(
        trained=partial(trained_groups, recipe, run),
        denominator=partial(recipe.denominator, run=run),
        pack=pack,
        pack_finished=lambda groups: pack(
            [without_advantages(g, partial(recipe.trained_tokens, run=run)) for g in groups]
        ),
        dummy=dummy_micro_batch,
        scope=recipe.scope,
        batch_rewards=partial(group_statistics, recipe, run),
        advantage_only=recipe.advantage_only,
        initial_controls=recipe.initial_controls(),
        next_controls=recipe.next_controls,
        ask_first=response_rows(recipe, run, pack),
        value_denominator=partial(recipe.value_denominator, run=run)
        if recipe.needs.critic
        else None,
    )
