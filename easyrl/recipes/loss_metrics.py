"""What is counted of a micro-batch's objective, summed over its trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.recipes.comparison import comparison_sums
from easyrl.recipes.estimators import importance_ratio, is_inside, kl_estimate

if TYPE_CHECKING:
    from easyrl.config import ObjectiveConfig
    from easyrl.schema import MicroBatch


@torch.no_grad()
def loss_metrics(
    tri: TriLogprobs,
    micro_batch: MicroBatch,
    config: ObjectiveConfig,
    loss_sum: Tensor,
    advantages: Tensor,
) -> MetricSums:
    """Sums over the N trained tokens; ``advantages`` [N] are those of the loss."""
    if micro_batch.is_dummy:
        return MetricSums()
    policy = tri.policy.logprobs.detach()
    ratio = torch.exp(policy - tri.old_logprobs)
    advantages = advantages.to(policy)
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
        importance = importance_ratio(tri.old_logprobs, inference)
        sums["importance_ratio_sum"] = importance.sum()
        if config.importance_correction == "truncated":
            sums["importance_capped_sum"] = (importance > config.importance_cap).sum()
        else:
            sums["importance_masked_sum"] = (~is_inside(importance, config.importance_cap)).sum()
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
