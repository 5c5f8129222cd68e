"""Groups without their masked responses, as recipes see them, and what they say put back in place.

A response is masked (``Score.masked``) where its rollout failed: no reward is known of it. The
recipe is given the group of the others, so that statistics are theirs alone.
"""

from __future__ import annotations

from dataclasses import replace

from easyrl.recipes.recipe import Recipe
from easyrl.schema import GroupOutputs, RolloutGroup, TrainedGroup


def without_masked(group: RolloutGroup) -> RolloutGroup:
    """``group`` with the responses and scores that are not masked; itself where none is."""
    places = group.unmasked
    if len(places) == len(group.completions):
        return group
    return replace(
        group,
        completions=tuple(group.completions[place] for place in places),
        scores=tuple(group.scores[place] for place in places),
    )


def said_of_unmasked(said: GroupOutputs, group: RolloutGroup) -> GroupOutputs:
    """What models say of the responses of ``without_masked(group)``."""
    places = group.unmasked
    if len(places) == len(group.completions):
        return said
    return GroupOutputs(
        tuple(said.values[place] for place in places if said.values),
        tuple(said.reference_logprobs[place] for place in places if said.reference_logprobs),
    )


def put_back(trained: TrainedGroup, group: RolloutGroup) -> TrainedGroup:
    """What is trained of ``without_masked(group)``, by the places in ``group``."""
    places = group.unmasked
    if len(places) == len(group.completions):
        return trained
    responses = [replace(each, sample=places[each.sample]) for each in trained.responses]
    return TrainedGroup(group, tuple(responses))


def too_few_left(recipe: Recipe, group: RolloutGroup) -> str | None:
    """Why masked responses leave too little of ``group`` to train; None: they do not."""
    num_left, num_all = len(group.unmasked), len(group.completions)
    if num_left == num_all or num_left >= (2 if recipe.compares_responses else 1):
        return None
    failures = [c.episode.failure for c in group.completions if c.episode and c.episode.failure]
    what = "all" if num_left == 0 else f"{num_all - num_left} of"
    said = f", the last: {failures[-1]}" if failures else ""
    return f"{what} {num_all} rollouts failed{said}"
