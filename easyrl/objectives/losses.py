"""The clipped policy-gradient loss of a micro-batch, as a sum over its trained tokens.

Nothing here is a mean: ``MicroBatch.loss_weights`` carries the aggregation (GRPO, DAPO, Dr. GRPO)
and one late scalar per optimizer step divides (DESIGN §2.4), so that the gradient of a batch does
not depend on how its groups are spread over micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.objectives.comparison import comparison_sums

if TYPE_CHECKING:
    from easyrl.config import ObjectiveConfig
    from easyrl.schema import MicroBatch


def policy_loss(
    tri: TriLogprobs, micro_batch: MicroBatch, config: ObjectiveConfig
) -> tuple[Tensor, MetricSums]:
    """Sum over the N trained tokens of ``loss_weights * per_token_loss``.

    Per token: ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A) + kl_coef * KL - entropy_coef * H``
    with ``ratio = policy / old policy`` (DeepSeekMath eq. 3; separate clips: DAPO §3.1). With
    ``importance_correction`` the first term is multiplied by ``importance_weights``.

    Returns:
        The loss sum (scalar, carries the policy's gradient) and its metrics, summed over tokens.
    """
    policy = tri.policy.logprobs
    if micro_batch.is_dummy:
        # Through the same outputs as any other: ZeRO-3 compares the ranks' paths backward.
        used = policy if config.entropy_coef == 0 else policy + tri.policy.entropy
        return used.sum() * 0.0, MetricSums()
    advantages = _advantages(tri, micro_batch, config)
    ratio = torch.exp(policy - tri.old_logprobs)
    clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if config.importance_correction != "none":
        per_token = per_token * importance_weights(
            importance_ratio(tri, micro_batch), config.importance_correction, config.importance_cap
        )
    if tri.reference_logprobs is not None and config.kl_coef > 0:
        per_token = per_token + config.kl_coef * kl_estimate(
            policy, tri.reference_logprobs, config.kl_estimator
        )
    if config.entropy_coef != 0:
        per_token = per_token - config.entropy_coef * tri.policy.entropy
    loss_sum = (micro_batch.loss_weights.to(policy) * per_token).sum()
    return loss_sum, _metrics(tri, micro_batch, config, loss_sum, ratio, advantages)


def importance_ratio(tri: TriLogprobs, micro_batch: MicroBatch) -> Tensor:
    """[N] ``old policy / inference``, both of the sampled token, no gradient.

    Times the loss's own ratio, policy / old policy, it is policy / inference: the importance ratio
    of tokens that the inference engine sampled, whose numerics are not the trainer's.
    """
    old = tri.old_logprobs.detach()
    return torch.exp(old - micro_batch.inference_logprobs.to(old))


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
    return torch.where(_is_inside(ratio, cap), ratio, 0.0)


def _is_inside(ratio: Tensor, cap: float) -> Tensor:
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


def _advantages(tri: TriLogprobs, micro_batch: MicroBatch, config: ObjectiveConfig) -> Tensor:
    """[N] the micro-batch's advantages, less the KL penalty where it is part of the reward."""
    advantages = micro_batch.advantages.to(tri.policy.logprobs)
    if tri.reference_logprobs is None or config.kl_in_reward_coef == 0:
        return advantages
    k1 = tri.policy.logprobs.detach() - tri.reference_logprobs
    return advantages - config.kl_in_reward_coef * reward_to_go(k1, micro_batch.sequence_index)


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
    assert bool((sequence_index.diff() >= 0).all()), "tokens of a sequence must be adjacent"
    if len(values) == 0:
        return values
    exact = values.double()  # the running sum is over the whole row, its differences are small
    after = exact.sum() - exact.cumsum(0)  # what follows each token, to the end of the row
    last = torch.searchsorted(sequence_index, sequence_index, right=True) - 1
    return (exact + after - after[last]).to(values.dtype)


@torch.no_grad()
def _metrics(
    tri: TriLogprobs,
    micro_batch: MicroBatch,
    config: ObjectiveConfig,
    loss_sum: Tensor,
    ratio: Tensor,
    advantages: Tensor,
) -> MetricSums:
    policy = tri.policy.logprobs.detach()
    inference = micro_batch.inference_logprobs.to(policy)
    against_inference = policy - inference
    low = (advantages < 0) & (ratio < 1 - config.clip_eps_low)
    high = (advantages > 0) & (ratio > 1 + config.clip_eps_high)
    sums = {
        "loss_sum": loss_sum,
        "entropy_sum": tri.policy.entropy.sum(),
        "ratio_sum": ratio.sum(),
        "clip_low_sum": low.sum(),
        "clip_high_sum": high.sum(),
        "logprob_diff_sum": against_inference.abs().sum(),
        # the inference server sampled, so the estimate is of KL(inference || trainer)
        "inference_kl_sum": (torch.exp(against_inference) - 1 - against_inference).sum(),
    }
    sums |= comparison_sums(policy, tri.policy.entropy, inference, micro_batch.sequence_index)
    if config.importance_correction != "none":
        importance = importance_ratio(tri, micro_batch)
        sums["importance_ratio_sum"] = importance.sum()
        if config.importance_correction == "truncated":
            sums["importance_capped_sum"] = (importance > config.importance_cap).sum()
        else:
            sums["importance_masked_sum"] = (~_is_inside(importance, config.importance_cap)).sum()
    if tri.reference_logprobs is not None:
        sums["kl_sum"] = kl_estimate(policy, tri.reference_logprobs, "k3").sum()
    maxima = {}
    if len(policy):
        maxima = {"logprob_diff_max": against_inference.abs().max(), "ratio_max": ratio.max()}
    # one transfer from the device instead of one per metric
    values = torch.stack([v.double() for v in (*sums.values(), *maxima.values())]).tolist()
    named = dict(zip([*sums, *maxima], values, strict=True))
    return MetricSums(
        sums={name: named[name] for name in sums}
        | {
            "num_loss_tokens": float(micro_batch.num_loss_tokens),
            "num_sequences": float(micro_batch.num_sequences),
        },
        maxima={name: named[name] for name in maxima},
    )
