"""Masked responses have no part in anything that a recipe makes of their group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from easyrl.build.control import scored_function
from easyrl.build.recipe import accept_function, group_functions
from easyrl.config.file import validate_config
from easyrl.episodes.turns import failed_at_once
from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.recipes import Recipe
from easyrl.recipes.groups import group_statistics, trained_groups
from easyrl.recipes.loading import BUILT_IN
from easyrl.schema import GroupOutputs, RolloutGroup, Score
from tests.recipes import REQUIRED, run_settings
from tests.tiny_models import random_group

RUN = replace(run_settings(max_tokens=10, num_generations=5), reward_weights={"exact": 1.0})
KEPT = [0, 2, 4]
OF_ROLLOUTS = {name: cls for name, cls in BUILT_IN.items() if cls.source == "rollouts"}


def group(index: int = 0, *, masked: bool = True) -> RolloutGroup:
    """Five responses, of which two are masked; or the three that are not, by themselves."""
    whole = random_group(np.random.default_rng(index), 3, [3, 4, 5, 6, 2], index=index)
    scores = [
        replace(score, components={"exact": score.reward})
        if place in KEPT
        else Score(9.0, {}, failed=True, masked=True)
        for place, score in enumerate(whole.scores)
    ]
    if masked:
        return replace(whole, scores=tuple(scores))
    return replace(
        whole,
        completions=tuple(whole.completions[place] for place in KEPT),
        scores=tuple(scores[place] for place in KEPT),
    )


def said(of: RolloutGroup) -> GroupOutputs:
    """A value for each token, of its place in the group of all."""
    own = tuple((c.logprobs / 2).astype(np.float32) for c in of.completions)
    return GroupOutputs(own, own)


@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_it_is_as_if_they_had_not_been_asked_for(name: str) -> None:
    recipe: Recipe = OF_ROLLOUTS[name](**REQUIRED.get(name, {}))
    made = {}
    for masked in (True, False):
        groups = [group(0, masked=masked), group(1, masked=masked)]
        outputs = [said(each) for each in groups]
        statistics = [
            group_statistics(recipe, RUN, *pair) for pair in zip(groups, outputs, strict=True)
        ]
        made[masked] = trained_groups(recipe, RUN, groups, statistics, outputs)
    for ours, alone in zip(made[True], made[False], strict=True):
        assert len(ours.group.completions) == 5
        assert [r.sample for r in ours.responses] == [KEPT[r.sample] for r in alone.responses]
        for one, other in zip(ours.responses, alone.responses, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.advantages, other.advantages)
            np.testing.assert_array_equal(one.loss_weights, other.loss_weights)


def config(**recipe: object):  # type: ignore[no-untyped-def]
    return validate_config(
        {
            "model": {"path": "m"},
            "data": {"files": ["d.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"name": "grpo"} | recipe,
        }
    )


def test_denominators_count_no_masked_token() -> None:
    functions = group_functions(config(aggregation="token"))
    assert functions.denominator([group()]) == functions.denominator([group(masked=False)]) == 10


def test_a_group_with_too_few_left_is_replaced() -> None:
    accept = accept_function(config())
    whole = group()
    assert accept(whole) is None

    def left(num: int) -> RolloutGroup:
        scores = tuple(replace(s, masked=i >= num) for i, s in enumerate(whole.scores))
        failed = failed_at_once("game", "KeyError: 'x'")
        completions = (*whole.completions[:num], *[failed] * (5 - num))
        return replace(whole, completions=completions, scores=scores)

    assert accept(left(2)) is None
    assert accept(left(1)) == "4 of 5 rollouts failed, the last: KeyError: 'x'"
    assert accept(left(0)) == "all 5 rollouts failed, the last: KeyError: 'x'"
    alone = accept_function(config(name="reinforce_pp"))
    with_one = alone(left(1))
    assert with_one is None or OF_ROLLOUTS["reinforce_pp"]().compares_responses


@pytest.mark.parametrize("shuffle", [True, "across_prompts"])
def test_the_control_leaves_them_where_they_are(shuffle: bool | str) -> None:
    scored = scored_function(shuffle, seed=0)  # type: ignore[arg-type]
    first, second = scored(group(0)), scored(group(1))
    for made, of in ((first, group(0)), (second, group(1))):
        assert [score.masked for score in made.scores] == [score.masked for score in of.scores]
    given = sorted(first.rewards[KEPT].tolist())
    assert given == sorted(group(0).rewards[KEPT].tolist())
    source = group(0) if shuffle == "across_prompts" else group(1)
    assert sorted(second.rewards[KEPT].tolist()) == sorted(source.rewards[KEPT].tolist())


def test_metrics_of_rewards_are_of_the_others() -> None:
    totals = BatchTotals()
    totals.add_counts(GroupCounts.of(group()))
    metrics = batch_metrics([Update(totals)], totals.groups)
    rewards = group(masked=False).rewards.astype(np.float64)
    assert metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert metrics["reward/std"] == pytest.approx(rewards.std(ddof=1))
    assert metrics["reward/max"] == pytest.approx(rewards.max())
    assert (metrics["reward/failures"], metrics["reward/masked"]) == (2.0, 2.0)
