"""The pure functions that recipes are made of: advantages and weights of responses in numpy; per
trained token in torch the clipped surrogate, importance weights, KL estimates and rewards to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Aggregation = Literal["sequence", "token", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


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


def each_reward_advantages(weighted: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """Rewards normalised in the group each by itself, and then summed, so that none hides another.

    ``A_i = sum_n w_n (r_n,i - mean(r_n)) / (std(r_n) + eps)``, the first step of GDPO (arXiv
    2601.05242), with ``group_advantages``' deviation and eps.

    Args:
        weighted: at least one; of each reward its weight, and float [G]
    Returns:
        float64 [G]; exactly zero where each reward is the same for all responses.
    Raises:
        ValueError: as ``group_advantages``.
    """
    total = np.zeros(len(weighted[0][1]))
    for weight, rewards in weighted:
        total += weight * group_advantages(rewards.astype(np.float64), "group_std")
    return total


def aggregation_weights(
    trained: np.ndarray, aggregation: Aggregation, max_tokens: int
) -> np.ndarray:
    """float [R], the weights of a response's tokens; ``trained`` bool [R] are those that count.

    The loss is ``sum(weight * token loss) / denominator``; three ways are published, which TRL
    calls ``grpo``, ``dapo`` and ``dr_grpo``:

    - ``sequence`` (GRPO: DeepSeekMath, eq. 3): mean over a response's tokens, then over responses.
    - ``token`` (DAPO, eq. 8): mean over all tokens.
    - ``constant`` (Dr. GRPO, §3.2): ``max_tokens`` in place of each response's length.
    """
    if aggregation == "token":
        weight = 1.0
    elif aggregation == "sequence":
        weight = 1.0 / max(1, int(trained.sum()))
    else:
        weight = 1.0 / max_tokens
    return np.full(len(trained), weight)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[N] ``min(ratio A, clip(ratio, 1 - low, 1 + high) A)``, PPO's (Schulman et al. 2017, eq. 7).

    Args:
        ratio: [N], policy / old policy, of the sampled token; carries gradient
        advantages: [N]
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def importance_ratio(old_logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """[N] ``old policy / inference``, both of the sampled token, no gradient.

    Times the loss's own ratio, policy / old policy, it is policy / inference: the importance ratio
    of tokens that the inference engine sampled, whose numerics are not the trainer's.
    """
    old = old_logprobs.detach()
    return torch.exp(old - inference_logprobs.to(old))


def importance_weights(
    ratio: Tensor, correction: Literal["truncated", "masked"], cap: float
) -> Tensor:
    """Factors of the tokens' losses that correct for the tokens being the inference engine's.

    ``truncated``: ``min(ratio, cap)`` (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"). ``masked``: ``ratio`` inside ``[1 / cap, cap]``, else 0, so
    that a token on which the two disagree wildly is dropped (masked importance sampling: IcePop,
    Ling Team 2025). Denominators count every token all the same.

    Args:
        ratio: [N], of ``importance_ratio``
    Returns:
        [N]
    """
    if correction == "truncated":
        return ratio.clamp(max=cap)
    return torch.where(is_inside(ratio, cap), ratio, 0.0)


def is_inside(ratio: Tensor, cap: float) -> Tensor:
    """bool [N], what ``masked`` keeps."""
    return (ratio >= 1 / cap) & (ratio <= cap)


def kl_estimate(policy: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) per token of the policy's samples (Schulman 2020).

    ``k1 = d``, ``k2 = d² / 2`` and ``k3 = exp(-d) - 1 + d`` with ``d = policy - reference``. k1 and
    k3 are unbiased, k2 and k3 never negative. As a loss, the gradient of k2 is ``d ∇log policy``,
    in expectation that of the reverse KL; that of k3 is not, and that of k1 is zero in expectation.
    As a reward, without gradient of its own, k1 has the policy gradient of the reverse KL.

    Args:
        policy, reference: log-probabilities [N]
    Returns:
        [N], nats
    """
    return kl_of_log_ratio(policy - reference, estimator)


def kl_of_log_ratio(difference: Tensor, estimator: KLEstimator) -> Tensor:
    """``kl_estimate`` of ``difference = policy - reference`` [N]."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.exp(-difference) - 1 + difference


def reward_to_go(values: Tensor, sequence_index: Tensor) -> Tensor:
    """Sum of ``values`` from each token to the end of its sequence.

    A penalty on later tokens is the only one that a token can influence, so crediting it with these
    leaves the policy gradient of the sequence's total unbiased (Sutton & Barto §13.3).

    Args:
        values: [N], the tokens of a sequence adjacent and in order
        sequence_index: int64 [N], not decreasing
    Returns:
        [N]
    """
    # On the host: CUDA has no deterministic running sum of floats, and refuses it in strict mode.
    sequence_index = sequence_index.cpu()
    assert bool((sequence_index.diff() >= 0).all()), "tokens of a sequence must be adjacent"
    if len(values) == 0:
        return values
    exact = values.cpu().double()  # the sum is over the whole row, its differences are small
    after = exact.sum() - exact.cumsum(0)  # what follows each token, to the end of the row
    last = torch.searchsorted(sequence_index, sequence_index, right=True) - 1
    return (exact + after - after[last]).to(values)


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[Q], the sum of ``values`` [n] over the tokens of each of ``num_sequences`` Q sequences.

    ``sequence_index`` int64 [n]. Carries gradient.
    """
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def sequence_ratio(log_ratio: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[n], at each token the ratio of its sequence per token: ``exp(mean of log_ratio)``.

    The geometric mean of the tokens' ratios (GSPO, arXiv 2507.18071, eq. 7). Carries gradient.

    Args:
        log_ratio: [n] log policy - log old policy
        sequence_index: int64 [n], below ``num_sequences``
    """
    sums = sequence_sums(log_ratio, sequence_index, num_sequences)
    lengths = sequence_sums(torch.ones_like(log_ratio), sequence_index, num_sequences)
    return torch.exp(sums / lengths.clamp(min=1))[sequence_index]


def leave_one_out_advantages(rewards: np.ndarray) -> np.ndarray:
    """Each reward less the mean of its group's other rewards (RLOO, arXiv 2402.14740).

    Args:
        rewards: float [G]
    Returns:
        float [G], of the dtype of ``rewards``; exactly zero where all rewards are equal.
    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    # r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1)
    centred = group_advantages(rewards.astype(np.float64), "group_mean")
    return (centred * len(rewards) / (len(rewards) - 1)).astype(rewards.dtype)


def normalised(
    values: np.ndarray, batch: np.ndarray, weights: np.ndarray, eps: float
) -> np.ndarray:
    """``(values - mean) / (std + eps)`` with weighted mean and deviation of ``batch``.

    The deviation is of the population, ``sqrt(sum w (b - mean)² / sum w)``.

    Args:
        values: float [G]
        batch, weights: float [M]
    Returns:
        float64 [G]; exactly zero where all of ``batch`` that has a weight is equal.
    """
    own, total = batch[weights > 0], weights.sum()
    if len(own) == 0 or np.ptp(own) == 0:
        return np.zeros(len(values))
    mean = (weights * batch).sum() / total
    deviation = np.sqrt((weights * np.square(batch - mean)).sum() / total)
    return (values - mean) / (deviation + eps)


def generalised_advantages(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], gamma: float, gae_lambda: float
) -> list[np.ndarray]:
    r"""GAE of each response: :math:`A_t = \sum_l (\gamma \lambda)^l \delta_{t+l}` with
    :math:`\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)` (Schulman et al. 2016, arXiv 1506.02438,
    eq. 16). Behind the last token the value is 0, also where a response was cut off.

    Args:
        rewards: G arrays float [n], a reward per token
        values: G arrays float [n], of the state before each token
    Returns:
        G arrays float64 [n]
    """
    longest = max(map(len, rewards), default=0)
    padded = np.zeros((2, len(rewards), longest + 1))
    for g, pair in enumerate(zip(rewards, values, strict=True)):
        for row, own in zip(padded[:, g], pair, strict=True):
            row[: len(own)] = own
    advantages = np.zeros((longest + 1, len(rewards)))
    for t in range(longest - 1, -1, -1):  # zeros behind a response's end stay zeros
        delta = padded[0, :, t] + gamma * padded[1, :, t + 1] - padded[1, :, t]
        advantages[t] = delta + gamma * gae_lambda * advantages[t + 1]
    return [advantages[: len(own), g].copy() for g, own in enumerate(rewards)]


def moments(values: np.ndarray) -> np.ndarray:
    """float64 [3]: count, mean, and sum of squared differences from the mean, of ``values`` [n]."""
    if len(values) == 0:
        return np.zeros(3)
    mean = values.mean()
    return np.array([len(values), mean, np.square(values - mean).sum()])


def merged_moments(parts: Sequence[np.ndarray]) -> np.ndarray:
    """``moments`` of all values together, of those of their ``parts``; summed in the order given.

    (Chan, Golub and LeVeque 1983: no difference of large sums.)
    """
    merged = np.zeros(3)
    for part in parts:
        num = merged[0] + part[0]
        if num > 0:
            difference = part[1] - merged[1]
            squares = merged[2] + part[2] + difference**2 * merged[0] * part[0] / num
            merged = np.array([num, merged[1] + difference * part[0] / num, squares])
    return merged
