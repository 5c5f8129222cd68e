"""Advantages, loss weights and trained tokens of finished groups, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easyrl.recipes.recipe import AdvantageInputs, Advantages, Recipe, RunSettings
from easyrl.schema import Completion, RolloutGroup, TrainedGroup, TrainedResponse


def trained_groups(
    recipe: Recipe,
    run: RunSettings,
    groups: Sequence[RolloutGroup],
    batch_rewards: Sequence[np.ndarray] = (),
) -> list[TrainedGroup]:
    """Advantages and loss weights of the tokens of ``groups`` that ``recipe`` trains.

    ``batch_rewards``: ``Recipe.batch_rewards`` of all groups of the optimizer step, for scope
    ``batch``. Raises ``ValueError`` if what the recipe returns does not fit the groups.
    """
    if recipe.scope == "batch" and groups:  # a rank may have none
        advantages = list(recipe.advantages(groups, run, AdvantageInputs(tuple(batch_rewards))))
    else:
        advantages = []
        for group in groups:
            advantages += recipe.advantages([group], run, AdvantageInputs((group.rewards,)))
    if len(advantages) != len(groups):
        name = type(recipe).__name__
        raise ValueError(f"{name}.advantages gave {len(advantages)} for {len(groups)}")
    pairs = zip(groups, advantages, strict=True)
    return [trained_group(recipe, group, own, run) for group, own in pairs]


def trained_group(
    recipe: Recipe, group: RolloutGroup, advantages: Advantages, run: RunSettings
) -> TrainedGroup:
    """Those of one group, whose ``advantages`` are given. Errors as ``trained_groups``."""
    size, name = len(group.completions), type(recipe).__name__
    said = {"advantages": advantages, "token_weights": recipe.token_weights(group, run)}
    for method, values in said.items():
        if len(values) != size:
            raise ValueError(f"{name}.{method} gave {len(values)} for a group of {size} responses")
    chosen = sorted(recipe.select(group, run))
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(size)):
        raise ValueError(f"{name}.select gave {chosen} for a group of {size} responses")
    responses = []
    for sample in chosen:
        completion = group.completions[sample]
        trained = recipe.trained_tokens(completion, run)
        mask = completion.loss_mask
        if trained.dtype != bool or trained.shape != mask.shape or (trained & ~mask).any():
            raise ValueError(f"{name}.trained_tokens has to be bool [R] within loss_mask")
        tokens = np.flatnonzero(trained)
        if len(tokens):
            per_token = []
            for method, values in said.items():
                shape = np.shape(values[sample])
                if shape not in ((), mask.shape):
                    raise ValueError(f"{name}.{method} gave shape {shape} for {len(mask)} tokens")
                per_token.append(np.broadcast_to(values[sample], mask.shape)[tokens])
            responses.append(TrainedResponse(sample, tokens, *per_token))
    return TrainedGroup(group, tuple(responses))


def without_advantages(
    group: RolloutGroup, trained_tokens: Callable[[Completion], np.ndarray]
) -> TrainedGroup:
    """All responses, for a row that is only to be given log-probabilities."""
    responses = []
    for sample, completion in enumerate(group.completions):
        tokens = np.flatnonzero(trained_tokens(completion))
        if len(tokens):
            zeros, ones = np.zeros(len(tokens)), np.ones(len(tokens))
            responses.append(TrainedResponse(sample, tokens, zeros, ones))
    return TrainedGroup(group, tuple(responses))
