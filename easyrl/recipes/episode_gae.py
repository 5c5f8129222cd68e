"""Generalised advantages of an episode, whose turns are a tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from easyrl.schema import Episode


class TokenTree(NamedTuple):
    """The trained tokens of an episode, by turn."""

    parents: tuple[int | None, ...]  # K, the turn that each continues, an earlier one
    bounds: np.ndarray  # int64 [K + 1], where each turn's tokens begin, rising to their number n


def tree_of(episode: Episode, trained: np.ndarray) -> TokenTree:
    """Of the tokens that are ``trained``, bool [R]."""
    ends = [0, *(turn.end for turn in episode.turns)]
    before = np.concatenate([[0], trained.cumsum()])
    return TokenTree(tuple(turn.parent for turn in episode.turns), before[ends])


def episode_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    outcome: float,
    tree: TokenTree,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    r"""GAE (``estimators.generalised_advantages``) along each branch of an episode.

    A branch leads from a turn that continues none to one that none continues, where the episode's
    outcome is the reward of its last token and the value behind it is 0. No branch sees what
    another one does: what follows a turn is what continues it. A token of several branches has the
    mean of its advantages in them; GAE is linear, so that it is enough to go backwards with the
    means of what follows, each branch counted once.

    Args:
        rewards: float [n], of each trained token, without the outcome
        values: float [n], of the state before each
        outcome: reward of the episode
    Returns:
        float64 [n]
    """
    parents, bounds = tree
    num_turns = len(parents)
    advantages = np.zeros(len(rewards))
    num_branches = np.zeros(num_turns)
    # of what follows a turn, summed over branches: reward that has no token yet, value, advantage
    following = np.zeros((num_turns, 3))
    for turn in reversed(range(num_turns)):
        if num_branches[turn]:
            reward, value, advantage = (following[turn] / num_branches[turn]).tolist()
        else:
            num_branches[turn], reward, value, advantage = 1.0, outcome, 0.0, 0.0
        start, end = int(bounds[turn]), int(bounds[turn + 1])
        own = list(zip(rewards[start:end].tolist(), values[start:end].tolist(), strict=True))
        for place in range(len(own) - 1, -1, -1):
            of_token, before = own[place]
            delta = of_token + reward + gamma * value - before
            advantage = delta + gamma * gae_lambda * advantage
            advantages[start + place] = advantage
            reward, value = 0.0, before
        if (parent := parents[turn]) is not None:
            num_branches[parent] += num_branches[turn]
            following[parent] += num_branches[turn] * np.array([reward, value, advantage])
    return advantages
