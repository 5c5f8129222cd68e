"""The batch that ``benchmarks.dynamic_sampling`` draws: lengths, rejections, training time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Load:
    """Every figure of a prompt is a function of its position in the order, whoever asks."""

    num_groups: int  # B, accepted
    num_samples: int  # G
    num_slots: int  # requests at a time, of all ranks
    rejection: float  # share of the prompts whose groups are rejected
    num_ranks: int = 1
    mean_s: float = 0.4  # of a response
    sigma: float = 0.8  # of the logarithm of a length
    seed: int = 0

    def seconds(self, position: int, sample: int) -> float:
        """That generating a response takes."""
        return float(_lengths(self, position)[sample])

    def accepts(self, position: int) -> bool:
        """What a higher ``rejection`` accepts, a lower one accepts too."""
        return bool(np.random.default_rng((self.seed, position, 1)).random() >= self.rejection)

    def rank_of(self, position: int) -> int:
        """Data-parallel rank that draws and trains it, as in strict mode."""
        return position % self.num_ranks


@lru_cache(maxsize=4096)
def _lengths(load: Load, position: int) -> np.ndarray:
    """float64 [G], log-normal with mean ``mean_s``"""
    mu = np.log(load.mean_s) - load.sigma**2 / 2
    rng = np.random.default_rng((load.seed, position, 0))
    return rng.lognormal(mu, load.sigma, load.num_samples)


def same_batch(some: list[int], others: list[int]) -> bool:
    """Whether two runs of a batch have trained the same prompts, each of them once."""
    return sorted(some) == sorted(others) and len(set(some)) == len(some)
