"""Groups of log-normal lengths, when they are finished, and how long training on each takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from easyrl.dataloaders.packing.cost import DEFAULT_COST

MEDIAN_TOKENS = 400  # of a response
PROMPT_SPREAD, RESPONSE_SPREAD = 0.8, 0.4  # of log-lengths: between prompts, within a group
LONGEST_PROMPT, LONGEST_RESPONSE = 256, 8192


@dataclass(frozen=True)
class Load:
    """One batch.

    Attributes:
        lengths: of each group, tokens of its prompt and of each response.
        arrivals_s: when each is finished, whoever has drawn it.
        train_s: seconds of training on each.
    """

    lengths: list[tuple[int, ...]]
    arrivals_s: list[float]
    train_s: list[float]


def make_load(
    num_groups: int, num_generations: int, seconds: float, ratio: float, seed: int
) -> Load:
    """All responses begin at once and grow equally fast.

    ``seconds``: of training, on each of two ranks with equal shares; ``ratio``: that to the seconds
    until the longest response is finished.
    """
    rng = np.random.default_rng(seed)
    means = np.log(MEDIAN_TOKENS) + PROMPT_SPREAD * rng.standard_normal((num_groups, 1))
    noise = RESPONSE_SPREAD * rng.standard_normal((num_groups, num_generations))
    responses = np.clip(np.exp(means + noise), 1, LONGEST_RESPONSE).astype(int)
    prompts = rng.integers(32, LONGEST_PROMPT, num_groups, endpoint=True)
    lengths = [(int(p), *map(int, r)) for p, r in zip(prompts, responses, strict=True)]
    costs = np.array([cost_of(prompt, rest) for prompt, *rest in lengths], dtype=float)
    longest = responses.max(axis=1)
    arrivals = longest / longest.max() * seconds / ratio
    return Load(lengths, arrivals.tolist(), (costs / costs.sum() * 2 * seconds).tolist())


cost_of = DEFAULT_COST.of_group
