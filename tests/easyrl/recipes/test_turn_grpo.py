"""Turn-level advantages against the formula written down again, token by token"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from easyrl.build.control import scored_function
from easyrl.recipes import GRPO, TurnGRPO
from easyrl.recipes.groups import trained_groups
from easyrl.recipes.recipe import AdvantageInputs
from easyrl.schema import Completion, RolloutGroup
from tests.easyrl.episodes.trees import episode, group, typical
from tests.recipes import run_settings
from tests.tiny_models import random_group

EPS = 1e-4  # beside a deviation, GRPO's


def rewarded(*rewards: tuple[float, ...], outcomes: tuple[float, ...]) -> RolloutGroup:
    """Episodes of as many turns as they have rewards."""
    made: list[Completion] = []
    for sample, (own, outcome) in enumerate(zip(rewards, outcomes, strict=True)):
        logged = typical(np.random.default_rng(sample), [10, 11, 12, 13])
        completion = episode(*logged[: len(own) or 2], reward=outcome)
        assert completion.episode is not None
        said = replace(completion.episode, turn_rewards=own)
        made.append(replace(completion, episode=said))
    return group(*made)


def advantages(recipe: GRPO, of: RolloutGroup) -> list[np.ndarray]:
    (own,) = recipe.advantages([of], run_settings(), AdvantageInputs((of.rewards,)))
    return [
        np.broadcast_to(values, len(c.token_ids))
        for values, c in zip(own, of.completions, strict=True)
    ]


def standardised(value: float, among: list[float]) -> float:
    if len(among) < 2 or len(set(among)) == 1:
        return 0.0
    return (value - statistics.fmean(among)) / (statistics.stdev(among) + EPS)


REWARDS = ((0.5, 0.0, 1.0), (0.0, 1.0), (0.25, 1.0, 3.0, 7.0), ())
OUTCOMES = (1.0, 0.0, 1.0, 0.5)


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_each_turn_has_its_own_beside_the_outcomes(coef: float) -> None:
    of = rewarded(*REWARDS, outcomes=OUTCOMES)
    got = advantages(TurnGRPO(turn_coef=coef), of)
    seen = set()
    for completion, values, reward, of_turns in zip(
        of.completions, got, OUTCOMES, REWARDS, strict=True
    ):
        assert completion.episode is not None
        outcome = standardised(reward, list(OUTCOMES))
        for k, turn in enumerate(completion.episode.turns):
            expected = outcome
            if of_turns:
                peers = [own[k] for own in REWARDS if k < len(own)]
                expected += coef * standardised(of_turns[k], peers)
            # the outcome's advantages are float32
            assert values[turn.sampled : turn.end] == pytest.approx(expected, abs=1e-6)
            seen.add(round(expected, 6))
    assert len(seen) > 6  # turns differ, or nothing is shown


def test_two_turns_of_which_the_first_is_rewarded_are_the_papers() -> None:
    of = rewarded((1.0, 0.0), (0.0, 0.0), (0.0, 0.0), outcomes=(1.0, 1.0, 0.0))
    got = advantages(TurnGRPO(), of)
    outcome = advantages(GRPO(), of)
    for completion, values, alone, first in zip(
        of.completions, got, outcome, (1.0, 0.0, 0.0), strict=True
    ):
        assert completion.episode is not None
        one, two = completion.episode.turns
        of_turn = standardised(first, [1.0, 0.0, 0.0])
        assert values[one.sampled : one.end] == pytest.approx(alone[0] + of_turn, abs=1e-6)
        assert values[two.sampled : two.end] == pytest.approx(alone[0], abs=1e-6)


def test_without_turn_rewards_it_is_grpo() -> None:
    plain = random_group(np.random.default_rng(0), 3, [2, 4, 3, 5])
    for of in (plain, rewarded((), (), outcomes=(1.0, 0.0))):
        for own, other in zip(advantages(TurnGRPO(), of), advantages(GRPO(), of), strict=True):
            np.testing.assert_array_equal(own, other)


def test_only_what_was_sampled_is_trained_and_an_episode_counts_once() -> None:
    of = rewarded(*REWARDS, outcomes=OUTCOMES)
    recipe = TurnGRPO()
    (trained,) = trained_groups(recipe, run_settings(), [of])
    for response in trained.responses:
        completion = of.completions[response.sample]
        assert response.tokens.tolist() == np.flatnonzero(completion.loss_mask).tolist()
        assert response.loss_weights.sum() == pytest.approx(1.0, rel=1e-12)
    assert recipe.denominator([of], run_settings()) == len(of.completions)


def test_equal_outcomes_are_no_reason_to_replace_a_group_with_turn_rewards() -> None:
    recipe = TurnGRPO(dynamic_sampling=True)
    flat = rewarded((1.0, 0.0), (0.0, 0.0), outcomes=(1.0, 1.0))
    assert recipe.rejects and recipe.accepts(flat, run_settings()) is None
    (trained,) = trained_groups(recipe, run_settings(), [flat])
    assert trained.has_signal
    nothing = rewarded((1.0, 0.0), (1.0, 0.0), outcomes=(1.0, 1.0))
    assert recipe.accepts(nothing, run_settings()) == "all rewards are equal"
    assert not TurnGRPO().rejects


@pytest.mark.parametrize("shuffle", [True, "across_prompts"])
def test_a_control_has_the_rewards_of_turns_permuted_too(shuffle: bool | str) -> None:
    """Each k-th turn's among the episodes that have one; over many prompts they credit nobody."""
    scored = scored_function(shuffle, seed=3)  # type: ignore[arg-type]
    of = rewarded(*REWARDS, outcomes=(1.0, 1.0, 1.0, 1.0))
    sums = [np.zeros(len(own)) for own in REWARDS]
    num_prompts = 600
    for index in range(num_prompts):
        made = scored(replace(of, prompt=replace(of.prompt, index=index)))
        turns = [c.episode.turn_rewards for c in made.completions if c.episode is not None]
        assert [len(own) for own in turns] == [3, 2, 4, 0]
        for k in range(4):
            before, after = ([own[k] for own in all_ if k < len(own)] for all_ in (REWARDS, turns))
            assert sorted(before) == sorted(after)
        for total, completion, values in zip(
            sums, made.completions, advantages(TurnGRPO(), made), strict=True
        ):
            assert completion.episode is not None
            total += [values[t.sampled] for t in completion.episode.turns[: len(total)]]
    # standardised values: four standard errors of their mean
    for total in sums:
        assert np.abs(total / num_prompts).max(initial=0.0) < 4 / num_prompts**0.5
