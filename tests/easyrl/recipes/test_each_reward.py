"""Rewards normalised each by itself before they are summed"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from easyrl.config.file import load_config
from easyrl.recipes import CISPO, DAPO, GDPO, GRPO, GSPO, DrGRPO, DualClip, GSPOToken, TwoSided
from easyrl.recipes.groups import trained_groups
from easyrl.recipes.loading import load_recipe, notices
from easyrl.recipes.recipe import AdvantageInputs, RunSettings
from easyrl.schema import RolloutGroup, Score
from tests.tiny_models import random_group

WEIGHTS = {"exact": 1.0, "format": 0.25}
RUN = RunSettings(8, 4, 1.0, 0, WEIGHTS)
RECIPES = [GRPO, DrGRPO, DAPO, GSPO, GSPOToken, CISPO, TwoSided, DualClip]
MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}, {name: format}]
trainer: {max_steps: 3}
"""


def group(exact: list[float], form: list[float], index: int = 0) -> RolloutGroup:
    made = random_group(np.random.default_rng(index), 2, [3] * len(exact), index=index)
    scores = tuple(
        Score(WEIGHTS["exact"] * a + WEIGHTS["format"] * b, {"exact": a, "format": b})
        for a, b in zip(exact, form, strict=True)
    )
    return RolloutGroup(made.prompt, made.completions, scores, "run:0:0", 0.0, 1.0)


@pytest.mark.parametrize("cls", RECIPES)
def test_every_recipe_with_the_key_streams_with_it(cls: type[GRPO]) -> None:
    recipe = cls(advantage="each_reward_std", **({"overlong_buffer": 0.0} if cls is DAPO else {}))
    assert recipe.scope == "group" and recipe.advantage_only == cls().advantage_only
    made = group([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, 0.5])
    (got,) = recipe.advantages([made], RUN, AdvantageInputs((made.rewards,)))
    assert got == pytest.approx(GDPO().batch_rewards(made, RUN), rel=1e-15)
    assert got[1] > 0 > got[0]


def test_a_reward_is_not_hidden_by_one_of_a_larger_scale() -> None:
    """Of two that are right the well-formed one is better by as much whatever the first's scale."""
    differences = []
    for scale in (1.0, 100.0):
        made = group([0.0, 0.0, scale, scale], [1.0, 0.0, 1.0, 0.0])
        (own,) = GRPO(advantage="each_reward_std").advantages([made], RUN, AdvantageInputs(()))
        differences.append(own[2] - own[3])
    assert differences[0] == pytest.approx(differences[1], rel=1e-12) and differences[0] > 0.4


def test_no_signal_is_where_every_reward_is_equal() -> None:
    recipe = GRPO(advantage="each_reward_std", kl_coef=0.0)
    flat = group([1.0] * 4, [0.3] * 4)
    (trained,) = trained_groups(recipe, RUN, [flat])
    assert all(not response.advantages.any() for response in trained.responses)


def test_dynamic_sampling_looks_at_the_sum_of_raw_rewards() -> None:
    """Though rewards that cancel in the sum have a signal each."""
    recipe = DAPO(advantage="each_reward_std", overlong_buffer=0.0)
    cancel = group([0.0, 0.25, 0.25, 0.5], [2.0, 1.0, 1.0, 0.0])
    assert np.ptp(cancel.rewards) == 0
    assert recipe.accepts(cancel, RUN) == "all rewards are equal"
    (own,) = recipe.advantages([cancel], RUN, AdvantageInputs(()))
    assert own.any()


def test_the_punishment_of_dapo_is_a_reward_of_its_own() -> None:
    made = random_group(np.random.default_rng(0), 2, [2, 4, 6, 8])
    made = RolloutGroup(
        made.prompt, made.completions, group([1.0] * 4, [0.0] * 4).scores, "run:0:0", 0.0, 1.0
    )
    recipe = DAPO(advantage="each_reward_std", overlong_buffer=0.5, overlong_penalty=0.1)
    (own,) = recipe.advantages([made], RUN, AdvantageInputs(()))
    punished = np.array([0.0, 0.0, -0.5, -1.0])
    expected = 0.1 * (punished - punished.mean()) / (punished.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(own, expected, rtol=1e-12)


def test_no_opinion_counts_as_zero_and_parts_of_a_reward_are_none() -> None:
    made = group([0.0, 1.0], [1.0, 1.0])
    scores = (Score(0.0, {"exact": 0.0}), Score(1.0, {"format": 2.0, "format/tags": 1.0}))
    made = RolloutGroup(made.prompt, made.completions, scores, "run:0:0", 0.0, 1.0)
    exact, form = GDPO().weighted_rewards(made, RUN)
    assert (exact[0], exact[1].tolist()) == (1.0, [0.0, 0.0])
    assert (form[0], form[1].tolist()) == (0.25, [0.0, 2.0])


@pytest.mark.parametrize("recipe", [GRPO(advantage="each_reward_std"), GDPO()])
def test_a_reward_without_a_weight_is_an_error(recipe: GRPO | GDPO) -> None:
    made = group([0.0, 1.0], [0.0, 1.0])
    run = RunSettings(8, 2, 1.0, 0, {"exact": 1.0})
    with pytest.raises(ValueError, match="reward 'format' has no weight among"):
        recipe.weighted_rewards(made, run)


def said_at_start(folder: Path, *overrides: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, overrides)
    return notices(config, load_recipe(config))


@pytest.mark.parametrize("recipe", ["name: dapo, advantage: each_reward_std", "name: gdpo"])
def test_the_reward_of_a_truncated_response_does_not_reach_it(tmp_path: Path, recipe: str) -> None:
    wanted = "scoring.truncated_reward: replaces the sum of a response's rewards"
    said = said_at_start(tmp_path, f"recipe={{{recipe}}}", "scoring.truncated_reward=0.0")
    assert [each for each in said if each.startswith(wanted)]
    said = said_at_start(tmp_path, f"recipe={{{recipe}}}")
    said += said_at_start(tmp_path, "recipe={name: dapo}", "scoring.truncated_reward=0.0")
    assert not [each for each in said if each.startswith(wanted)]
