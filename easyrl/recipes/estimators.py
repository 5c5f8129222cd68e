"""The clipped surrogate, importance weights, KL estimates and rewards to go, per trained token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


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


def kl_estimate(policy: Tensor, reference: Tensor, estimator: Literal["k3", "k2"]) -> Tensor:
    """Estimate of KL(policy || reference) per token of the policy's samples (Schulman 2020).

    ``k3 = exp(-d) - 1 + d`` and ``k2 = d² / 2`` with ``d = policy - reference``. The gradient of k2
    is ``d ∇log policy``, in expectation that of the reverse KL; that of k3 is not.

    Args:
        policy, reference: log-probabilities [N]
    Returns:
        [N], nats
    """
    difference = policy - reference
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
