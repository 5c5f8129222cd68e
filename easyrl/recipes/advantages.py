"""Advantages of the responses of one prompt, relative to their group."""

from __future__ import annotations

from typing import Literal

import numpy as np


def group_advantages(
    rewards: np.ndarray, mode: Literal["group_std", "group_mean"], eps: float = 1e-4
) -> np.ndarray:
    """Rewards centred on the group's mean and, for ``group_std``, divided by its deviation.

    ``A_i = (r_i - mean(r)) / (std(r) + eps)`` with the sample standard deviation (``ddof=1``), as
    in GRPO (DeepSeekMath, §4.1.2) and TRL; ``group_mean`` leaves the division out (Dr. GRPO, §3.2).

    Args:
        rewards: float [G]
    Returns:
        float [G], of the dtype of ``rewards``; exactly zero where all rewards are equal.
    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    if rewards.ndim != 1 or len(rewards) < 2:
        raise ValueError(
            f"a group needs at least 2 rewards for a baseline, got shape {rewards.shape}; "
            "raise rollout.num_generations"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards {rewards.tolist()} are not finite; repair the reward function")
    # The mean of equal floats need not equal them, and eps would magnify the difference.
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    if mode == "group_std":
        centred = centred / (exact.std(ddof=1) + eps)
    return centred.astype(rewards.dtype)
