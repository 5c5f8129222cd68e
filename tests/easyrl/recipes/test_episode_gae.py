"""GAE of an episode's tree against GAE of each of its branches by itself, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from easyrl.recipes import PPO, AdvantageInputs, RunSettings
from easyrl.recipes.reinforce_pp import ReinforcePP
from easyrl.schema import Completion
from tests.easyrl.episodes.trees import Logged, episode, group, typical

RUN = RunSettings(max_tokens=64, num_generations=2, temperature=1.0, seed=3)


def branches(completion: Completion) -> list[list[int]]:
    """Places of the sampled tokens of each branch, from its beginning to its end."""
    assert completion.episode is not None
    turns = completion.episode.turns
    leaves = set(range(len(turns))) - {turn.parent for turn in turns}
    found = []
    for leaf in sorted(leaves):
        path, at = list[int](), leaf
        while at is not None:
            path = [*range(turns[at].sampled, turns[at].end), *path]
            at = turns[at].parent
        found.append(path)
    return found


def by_branch(
    completion: Completion, rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """float64 [R]: the definition, a sum over what follows, in each branch; then their mean."""
    assert completion.episode is not None
    total, count = np.zeros(len(rewards)), np.zeros(len(rewards))
    for path in branches(completion):
        r, v = rewards[path].copy(), np.append(values[path], 0.0)
        r[-1] += completion.episode.reward
        deltas = r + gamma * v[1:] - v[:-1]
        for t, place in enumerate(path):
            ahead = np.arange(len(path) - t)
            total[place] += ((gamma * lam) ** ahead * deltas[t:]).sum()
            count[place] += 1
    return np.divide(total, count, out=total, where=count > 0)


def several(rng: np.random.Generator) -> list[Completion]:
    """Trees of a few and of many branches, a line of turns, and a single turn."""
    line = [Logged([1, 2], [5, 6])]
    for _ in range(3):
        line.append(
            Logged([*line[-1].prompt, *line[-1].sampled, 7], rng.integers(3, 9, 2).tolist())
        )
    deep = list(line)  # branches off each turn of it
    for each in line[:-1]:
        deep += [Logged([*each.prompt, *each.sampled, 8], [9, 3, 4]) for _ in range(2)]
    return [
        episode(*typical(rng, [1, 2, 3]), reward=1.5),
        episode(*deep, reward=-0.5),
        episode(*line, reward=2.0),
        episode(Logged([1], [2, 3]), reward=1.0),
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0)])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_each_branch_is_a_trajectory_of_its_own(gamma: float, lam: float, kl: float) -> None:
    rng = np.random.default_rng(1)
    made = several(rng)
    values, references = (
        tuple(rng.normal(size=len(c.token_ids)).astype(np.float32) for c in made) for _ in range(2)
    )
    recipe = PPO(gamma=gamma, gae_lambda=lam, whiten=False, kl_in_reward_coef=kl)
    inputs = AdvantageInputs((), (values,), (references,))
    (found,) = recipe.advantages([group(*made)], RUN, inputs)
    (returns,) = recipe.returns([group(*made)], RUN, inputs)
    for completion, own, value, reference, target in zip(
        made, found, values, references, returns, strict=True
    ):
        sampled = completion.loss_mask
        log_ratio = completion.logprobs.astype(np.float64) - reference
        rewards = np.where(sampled, -kl * log_ratio, 0.0)
        expected = by_branch(completion, rewards, value.astype(np.float64), gamma, lam)
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12)  # order of sums
        np.testing.assert_allclose(target[sampled], (expected + value)[sampled], atol=1e-12)
        assert not own[~sampled].any()


def test_what_happens_in_one_branch_is_nothing_to_another() -> None:
    rng = np.random.default_rng(2)
    made = episode(*typical(rng, [1, 2, 3]))
    assert made.episode is not None
    values = rng.normal(size=len(made.token_ids)).astype(np.float32)
    agent = made.episode.turns[2]  # a conversation of its own
    changed = values.copy()
    changed[agent.sampled : agent.end] += 7.0
    recipe = PPO(whiten=False)
    one, other = (
        recipe.advantages([group(made)], RUN, AdvantageInputs((), ((v,),), ()))[0][0]
        for v in (values, changed)
    )
    is_agents = np.zeros(len(values), bool)
    is_agents[agent.sampled : agent.end] = True
    np.testing.assert_array_equal(one[~is_agents], other[~is_agents])
    assert (one != other)[is_agents].all()


def test_a_kl_in_the_reward_is_paid_for_in_the_own_branches() -> None:
    """Of REINFORCE++, whose reward to go is GAE without values."""
    rng = np.random.default_rng(3)
    made = several(rng)
    references = tuple(rng.normal(size=len(c.token_ids)).astype(np.float32) for c in made)
    recipe = ReinforcePP(kl_in_reward_coef=0.3)
    inputs = AdvantageInputs((), (), (references,))
    raw = recipe._of_tokens(group(*made), 0, RUN, inputs)
    for completion, own, reference in zip(made, raw, references, strict=True):
        log_ratio = completion.logprobs.astype(np.float64) - reference
        rewards = np.where(completion.loss_mask, -0.3 * log_ratio, 0.0)
        expected = by_branch(completion, rewards, np.zeros(len(rewards)), 1.0, 1.0)
        np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12)
