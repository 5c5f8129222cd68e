"""Episodes whose turns are known, as their endpoints would have logged them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from easyrl.episodes.turns import TurnRecord, episode_completion, recorded
from easyrl.schema import Completion, Prompt, RolloutGroup, Score
from tests.easyrl.episodes.parts import VERSION, sampled


class Logged(NamedTuple):
    """What an endpoint was shown, and what it made of it."""

    prompt: list[int]
    sampled: list[int]
    url: str = "http://a"


def records_of(*logged: Logged) -> list[TurnRecord]:
    records: list[TurnRecord] = []
    for each in logged:
        made = sampled(np.array(each.sampled, np.int32), each.url)
        records.append(recorded(np.array(each.prompt, np.int32), made, records))
    return records


def episode(*logged: Logged, reward: float = 1.0) -> Completion:
    return episode_completion(records_of(*logged), "game", reward)


def group(*completions: Completion, index: int = 0) -> RolloutGroup:
    return RolloutGroup(
        prompt=Prompt(index, np.array([1, 2], np.int32), "q", None),
        completions=completions,
        scores=tuple(Score(c.episode.reward if c.episode else 0.0, {}) for c in completions),
        policy_version=VERSION,
        dispatched_s=0.0,
        completed_s=1.0,
    )


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 60, length).tolist()


def typical(rng: np.random.Generator, root: Sequence[int]) -> list[Logged]:
    """Three turns, a sub-agent with a prompt of its own, a retry, a history that was tokenised
    anew, and one that was cut in the middle; of two endpoints."""

    def made(prompt: Sequence[int], length: int, url: str = "http://a") -> Logged:
        return Logged(list(prompt), random_tokens(rng, length), url)

    one = made(root, 5)
    two = made([*one.prompt, *one.sampled, *random_tokens(rng, 3)], 4)
    agent = made(random_tokens(rng, 6), 3)
    three = made([*two.prompt, *two.sampled, *random_tokens(rng, 2)], 6, "http://b")
    retry = made(two.prompt, 4)
    anew = made([*one.prompt, *one.sampled[:-1], 61, *random_tokens(rng, 3)], 3)
    cut = made([*root[:2], *three.sampled, *random_tokens(rng, 2)], 2, "http://b")
    return [one, two, agent, three, retry, anew, cut]
