"""The objective's pure functions of groups, as the configuration wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easyrl.config import Config
from easyrl.dataloaders.packing.cost import cost_of_model_at
from easyrl.dataloaders.packing.groups import batch_denominator, pack_groups
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.recipes.advantages import group_advantages
from easyrl.runtime.determinism import is_strict
from easyrl.runtime.seeding import sample_seed
from easyrl.schema import MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import GroupFunctions

# With groups of a third of a row, takes of 8 rows need 11 % fewer rows than takes of one (simulated
# log-normal sizes), and the costs of rows vary half as much.
ROWS_PER_DRAIN = 8

Pack = Callable[[Sequence[RolloutGroup], Sequence[np.ndarray]], list[MicroBatch]]


def group_functions(config: Config) -> GroupFunctions:
    """What the trainer makes of finished groups."""
    return GroupFunctions(
        advantages=_advantages(config),
        pack=pack_function(
            config,
            mask_truncated=config.rollout.truncated == "mask",
            keep_order=is_strict(config),  # there, rows are a matter of the prompts' order
        ),
        denominator=_denominator(config),
        dummy=dummy_micro_batch,
    )


def rows_per_drain(config: Config) -> int:
    """Micro-batches' worth of ready groups that are packed together.

    One in strict mode, where a take waits for each of its groups.
    """
    return 1 if is_strict(config) else ROWS_PER_DRAIN


def _advantages(config: Config) -> Callable[[RolloutGroup], np.ndarray]:
    objective = config.objective

    def advantages(group: RolloutGroup) -> np.ndarray:
        rewards = group.rewards
        if objective.shuffle_rewards:
            key = sample_seed(config.run.seed, group.prompt.epoch, group.prompt.index, -1)
            rewards = np.random.default_rng(key).permutation(rewards)
        return group_advantages(rewards, objective.advantage)

    return advantages


def pack_function(config: Config, *, mask_truncated: bool, keep_order: bool) -> Pack:
    """``pack_groups`` as the configuration wants it, with the costs of its model."""
    cost = cost_of_model_at(config.model.path)

    def pack(groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]) -> list[MicroBatch]:
        return pack_groups(
            groups,
            advantages,
            aggregation=config.objective.aggregation,
            max_tokens=config.rollout.max_tokens,
            mask_truncated=mask_truncated,
            max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
            packing=config.trainer.packing,
            keep_order=keep_order,
            cost=cost,
        )

    return pack


def _denominator(config: Config) -> Callable[[Sequence[RolloutGroup]], float]:
    def denominator(groups: Sequence[RolloutGroup]) -> float:
        mask_truncated = config.rollout.truncated == "mask"
        return batch_denominator(groups, config.objective.aggregation, mask_truncated)

    return denominator
