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


def branches_by_hand(completion: Completion) -> list[list[int]]:
    """From each turn that none continues back to the first."""
    assert completion.episode is not None
    turns = completion.episode.turns
    leaves = [n for n in range(len(turns)) if all(turn.parent != n for turn in turns)]
    lines = []
    for leaf in leaves:
        line: list[int] = []
        at: int | None = leaf
        while at is not None:
            line.insert(0, at)
            at = turns[at].parent
        lines.append(line)
    return lines


TREE_REWARDS = (
    (0.0, 0.0, 1.0, 2.0, -1.0, 0.5, 0.0),  # 7 turns: a sub-agent, a retry, two other histories
    (0.25, 0.0, 0.0, 1.0, 1.0, 0.0, 3.0),
    (0.0, 4.0),
    (),
)


@pytest.mark.parametrize("coef", [1.0, 0.25])
@pytest.mark.parametrize("advantage", ["group_std", "group_mean"])
def test_a_turn_has_the_mean_of_its_branches(coef: float, advantage: str) -> None:
    of = rewarded(*TREE_REWARDS, outcomes=OUTCOMES)
    recipe = TurnGRPO(turn_coef=coef, advantage=advantage, credit="branch")  # type: ignore[arg-type]
    outcomes = advantages(GRPO(advantage=advantage), of)  # type: ignore[arg-type]
    lines = [branches_by_hand(completion) for completion in of.completions]
    assert [len(own) for own in lines[:2]] == [5, 5]
    assert any(len({line[0] for line in own}) < len(own) for own in lines)  # turns are shared
    returns = [
        [sum(rewards[k] for k in line) for line in own] if rewards else []
        for own, rewards in zip(lines, TREE_REWARDS, strict=True)
    ]
    every = [value for own in returns for value in own]
    mean, deviation = statistics.fmean(every), statistics.stdev(every) + EPS
    seen = set()
    for completion, values, outcome, own, of_branches in zip(
        of.completions, advantages(recipe, of), outcomes, lines, returns, strict=True
    ):
        assert completion.episode is not None
        for k, turn in enumerate(completion.episode.turns):
            expected = outcome[0]
            if of_branches:
                through = [r - mean for r, line in zip(of_branches, own, strict=True) if k in line]
                if advantage == "group_std":
                    through = [value / deviation for value in through]
                expected += coef * statistics.fmean(through)
            assert values[turn.sampled : turn.end] == pytest.approx(expected, abs=1e-6)
            seen.add(round(float(expected), 6))
    assert len(seen) >= 8


def test_a_line_of_turns_is_one_branch_and_one_alone_is_worth_nothing() -> None:
    of = rewarded((0.0, 1.0), (0.5, 0.0), outcomes=(1.0, 1.0))
    one, two = advantages(TurnGRPO(credit="branch"), of)
    first, second = (standardised(value, [1.0, 0.5]) for value in (1.0, 0.5))
    for values, expected, completion in ((one, first, 0), (two, second, 1)):
        tokens = values[of.completions[completion].loss_mask]
        assert tokens == pytest.approx(expected, abs=1e-6)  # all turns alike, the first too
    alone = rewarded((0.0, 1.0), (), outcomes=(1.0, 0.0))
    for own, other in zip(
        advantages(TurnGRPO(credit="branch"), alone), advantages(GRPO(), alone), strict=True
    ):
        np.testing.assert_array_equal(own, other)


def test_equal_branches_are_no_signal_though_their_turns_differ() -> None:
    of = rewarded((1.0, 0.0), (0.0, 1.0), outcomes=(1.0, 1.0))
    by_turn, by_branch = (
        TurnGRPO(dynamic_sampling=True, credit=credit)  # type: ignore[arg-type]
        for credit in ("turn", "branch")
    )
    assert by_turn.accepts(of, run_settings()) is None
    assert by_branch.accepts(of, run_settings()) == "all rewards are equal"
    other = rewarded((1.0, 0.0), (0.0, 0.5), outcomes=(1.0, 1.0))
    assert by_branch.accepts(other, run_settings()) is None
