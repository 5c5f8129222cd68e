"""Several updates on one batch: its slices, and dense fp64 PPO of them (arXiv 1707.06347, eq. 7).

Independent of ours but for the advantages: plain Hugging Face models on one sequence at a time, the
surrogate written out, torch's clip and AdamW. The policy moves far in each update, so that ratios
of the later ones lie on both sides of the clip.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from easyrl.recipes.estimators import group_advantages
from easyrl.schema import MicroBatch, RolloutGroup
from tests.easyrl.engines.engine_cases import (
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    MAX_GRAD_NORM,
    MAX_TOKENS,
    dense_logprobs,
)
from tests.recipes import batch_denominator, pack_groups
from tests.tiny_models import random_group

# An eps far above every gradient: the step is lr / eps times the gradients' running mean, so that
# rounding is not magnified where a gradient is nearly zero.
STEP_SCALE = 2.0
LEARNING_RATE = 1e9 * STEP_SCALE
OPTIMIZER = {"learning_rate": LEARNING_RATE, "adam_eps": 1e9, "lr_schedule": "linear"}


def learning_rate(update: int, num_updates: int) -> float:
    """Of a linear schedule that ends with the second batch: each update is a step of it."""
    return LEARNING_RATE * (1 - update / (2 * num_updates))


def make_batch() -> list[RolloutGroup]:
    """Eight groups, in prompt order."""
    rng = np.random.default_rng(5)
    return [
        random_group(rng, int(rng.integers(2, 9)), rng.integers(1, 11, 3).tolist(), index=i)
        for i in range(8)
    ]


def slices(num_updates: int) -> list[list[RolloutGroup]]:
    """Consecutive prompts, as the trainer assigns them."""
    groups = make_batch()
    size = len(groups) // num_updates
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def rows_of(groups: list[RolloutGroup]) -> list[MicroBatch]:
    """At least two rows, the groups in another order than the prompts'."""
    shuffled = groups[::-1]
    return pack_groups(
        shuffled,
        [group_advantages(group.rewards, "group_std") for group in shuffled],
        aggregation="token",
        max_tokens=MAX_TOKENS,
        mask_truncated=False,
        max_tokens_per_micro_batch=24,
    )


def denominator_of(groups: list[RolloutGroup]) -> float:
    return batch_denominator(groups, "token", False)


class Update(NamedTuple):
    """What an update of the dense reference came to."""

    moved: dict[str, Tensor]  # fp64, weights after it less those at the start, by name
    grad_norm: float  # before the norm's clip
    num_clipped: int  # tokens whose surrogate has no gradient


def dense_updates(folder: Path, num_updates: int, *, clip: float = CLIP) -> list[Update]:
    """The updates of one batch; the old policy is the policy before the first of them."""
    policy, old, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", "policy", "reference")
    )
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        eps=OPTIMIZER["adam_eps"],
        weight_decay=0.0,
    )
    updates = []
    for i, groups in enumerate(slices(num_updates)):
        optimizer.param_groups[0]["lr"] = learning_rate(i, num_updates)
        loss, num_clipped = dense_loss(groups, policy, old, reference, clip)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM))
        optimizer.step()
        moved = {name: p.detach() - start[name] for name, p in policy.named_parameters()}
        updates.append(Update(moved, norm, num_clipped))
    return updates


def dense_loss(
    groups: list[RolloutGroup],
    policy: PreTrainedModel,
    old: PreTrainedModel,
    reference: PreTrainedModel,
    clip: float = CLIP,
) -> tuple[Tensor, int]:
    """The mean over tokens, and the tokens whose surrogate has no gradient."""
    losses, num_clipped = [], 0
    for group in groups:
        advantages = group_advantages(group.rewards, "group_std")
        for completion, advantage in zip(group.completions, advantages.tolist(), strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            logp, entropy = dense_logprobs(policy, *ids)
            with torch.no_grad():
                old_logp, ref_logp = (dense_logprobs(m, *ids)[0] for m in (old, reference))
            ratio = (logp - old_logp).exp()
            outside = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
            bound = 1 + clip if advantage > 0 else 1 - clip
            surrogate = torch.where(outside, torch.full_like(ratio, bound), ratio) * advantage
            kl = (ref_logp - logp).exp() - (ref_logp - logp) - 1
            losses.append((-surrogate + KL_COEF * kl - ENTROPY_COEF * entropy).sum())
            num_clipped += int(outside.sum())
    num_tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    return torch.stack(losses).sum() / num_tokens, num_clipped
