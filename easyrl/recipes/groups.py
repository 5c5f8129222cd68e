"""Advantages, loss weights and trained tokens of finished groups, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from easyrl.recipes.recipe import Advantages, Recipe
from easyrl.recipes.terms import AdvantageInputs, RunSettings
from easyrl.schema import Completion, RolloutGroup, TrainedGroup, TrainedResponse


def trained_groups(
    recipe: Recipe,
    run: RunSettings,
    groups: Sequence[RolloutGroup],
    batch_rewards: Sequence[np.ndarray] = (),
) -> list[TrainedGroup]:
    """Advantages and loss weights of the tokens of ``groups`` that ``recipe`` trains.

    ``batch_rewards``: float32 [G] of all groups of the optimizer step, for scope ``batch``. Raises
    ``ValueError`` if what the recipe returns does not fit the groups.
    """
    if recipe.scope == "batch":
        inputs = AdvantageInputs(tuple(batch_rewards))
        advantages = list(recipe.advantages(groups, run, inputs))
    else:
        advantages = [
            own
            for group in groups
            for own in recipe.advantages([group], run, AdvantageInputs((group.rewards,)))
        ]
    if len(advantages) != len(groups):
        raise ValueError(f"{_name(recipe, 'advantages')} gave {len(advantages)} for {len(groups)}")
    pairs = zip(groups, advantages, strict=True)
    return [trained_group(recipe, group, own, run) for group, own in pairs]


def trained_group(
    recipe: Recipe, group: RolloutGroup, advantages: Advantages, run: RunSettings
) -> TrainedGroup:
    """Those of one group, whose ``advantages`` are given. Errors as ``trained_groups``."""
    size = len(group.completions)
    weights = recipe.token_weights(group, run)
    for what, values in (("advantages", advantages), ("token_weights", weights)):
        if len(values) != size:
            raise ValueError(
                f"{_name(recipe, what)} gave {len(values)} for a group of {size} responses"
            )
    chosen = sorted(recipe.select(group, run))
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(size)):
        raise ValueError(f"{_name(recipe, 'select')} gave {chosen} for a group of {size} responses")
    responses = []
    for sample in chosen:
        completion = group.completions[sample]
        trained = recipe.trained_tokens(completion, run)
        mask = completion.loss_mask
        if trained.dtype != bool or trained.shape != mask.shape or (trained & ~mask).any():
            raise ValueError(
                f"{_name(recipe, 'trained_tokens')} has to be bool [R] within loss_mask"
            )
        tokens = np.flatnonzero(trained)
        if len(tokens):
            own, weight = (
                _per_token(recipe, what, values[sample], len(mask))[tokens]
                for what, values in (("advantages", advantages), ("token_weights", weights))
            )
            responses.append(TrainedResponse(sample, tokens, own, weight))
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


def _per_token(recipe: Recipe, method: str, values: np.ndarray, num_tokens: int) -> np.ndarray:
    if np.shape(values) not in ((), (num_tokens,)):
        raise ValueError(
            f"{_name(recipe, method)} gave shape {np.shape(values)} for {num_tokens} tokens"
        )
    return np.broadcast_to(values, num_tokens)


def _name(recipe: Recipe, method: str) -> str:
    return f"{type(recipe).__name__}.{method}"
