"""Advantages, loss weights and trained tokens of finished groups, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from easyrl.recipes.masked import put_back, said_of_unmasked, without_masked
from easyrl.recipes.recipe import AdvantageInputs, Advantages, Recipe, RunSettings
from easyrl.schema import (
    NOTHING_SAID,
    Completion,
    GroupOutputs,
    RolloutGroup,
    TrainedGroup,
    TrainedResponse,
)


def trained_groups(
    recipe: Recipe,
    run: RunSettings,
    groups: Sequence[RolloutGroup],
    batch_rewards: Sequence[np.ndarray] = (),
    said: Sequence[GroupOutputs] = (),
) -> list[TrainedGroup]:
    """Advantages and loss weights of the tokens of ``groups`` that ``recipe`` trains.

    Masked responses are left out, as if they were not of their groups. ``batch_rewards``:
    ``group_statistics`` of all groups of the optimizer step, for scope ``batch``. ``said``: of each
    of ``groups``, where the recipe asks models first. Raises ``ValueError`` if what the recipe
    returns does not fit the groups.
    """
    whole, said = groups, said or [NOTHING_SAID] * len(groups)
    said = [said_of_unmasked(own, group) for own, group in zip(said, whole, strict=True)]
    groups = [without_masked(group) for group in whole]
    if recipe.scope == "batch":
        inputs = AdvantageInputs(
            tuple(batch_rewards),
            tuple(each.values for each in said),
            tuple(each.reference_logprobs for each in said),
        )
        calls = [(groups, inputs)] if groups else []  # a rank may have none
    else:
        calls = [([g], _inputs_of(g, own)) for g, own in zip(groups, said, strict=True)]
    advantages: list[Advantages] = []
    returns: list[Sequence[np.ndarray] | None] = []
    for some, inputs in calls:
        advantages += recipe.advantages(some, run, inputs)
        returns += recipe.returns(some, run, inputs) if recipe.needs.critic else [None] * len(some)
    for method, made in (("advantages", advantages), ("returns", returns)):
        if len(made) != len(groups):
            name = type(recipe).__name__
            raise ValueError(f"{name}.{method} gave {len(made)} for {len(groups)}")
    rows = zip(groups, advantages, returns, strict=True)
    trained = [trained_group(recipe, group, own, run, targets) for group, own, targets in rows]
    return [put_back(own, group) for own, group in zip(trained, whole, strict=True)]


def trained_group(
    recipe: Recipe,
    group: RolloutGroup,
    advantages: Advantages,
    run: RunSettings,
    returns: Sequence[np.ndarray] | None = None,
) -> TrainedGroup:
    """Those of one group, whose ``advantages`` are given. Errors as ``trained_groups``."""
    size, name = len(group.completions), type(recipe).__name__
    said = {"advantages": advantages, "token_weights": recipe.token_weights(group, run)}
    if returns is not None:
        said["returns"] = returns
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
        if trained is not mask and not _is_within(mask, trained):
            raise ValueError(f"{name}.trained_tokens has to be bool [R] within loss_mask")
        tokens = np.flatnonzero(trained)
        if len(tokens):
            per_token = []
            for method, values in said.items():
                value = np.asarray(values[sample])
                if value.shape not in ((), mask.shape):
                    shape = value.shape
                    raise ValueError(f"{name}.{method} gave shape {shape} for {len(mask)} tokens")
                per_token.append(value[tokens] if value.ndim else value.repeat(len(tokens)))
            responses.append(TrainedResponse(sample, tokens, *per_token))
    return TrainedGroup(group, tuple(responses))


def _is_within(mask: np.ndarray, trained: np.ndarray) -> bool:
    is_alike = trained.dtype == bool and trained.shape == mask.shape
    return is_alike and not (trained & ~mask).any()


def group_statistics(
    recipe: Recipe, run: RunSettings, group: RolloutGroup, said: GroupOutputs = NOTHING_SAID
) -> np.ndarray:
    """What the ranks exchange of ``group``, for scope ``batch``."""
    said, group = said_of_unmasked(said, group), without_masked(group)
    return recipe.batch_statistics(group, run, _inputs_of(group, said))


def without_advantages(
    group: RolloutGroup,
    trained_tokens: Callable[[Completion], np.ndarray],
    samples: Collection[int] | None = None,
) -> TrainedGroup:
    """All responses, or only ``samples``, for a row that is only to be given to frozen models."""
    responses = []
    for sample, completion in enumerate(group.completions):
        tokens = np.flatnonzero(trained_tokens(completion))
        if len(tokens) and (samples is None or sample in samples):
            zeros, ones = np.zeros(len(tokens)), np.ones(len(tokens))
            responses.append(TrainedResponse(sample, tokens, zeros, ones))
    return TrainedGroup(group, tuple(responses))


def _inputs_of(group: RolloutGroup, said: GroupOutputs) -> AdvantageInputs:
    """Those of one group alone."""
    return AdvantageInputs((group.rewards,), (said.values,), (said.reference_logprobs,))
