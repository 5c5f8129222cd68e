"""What a single process with plain Hugging Face models in fp64 makes of the batch.

Each sequence runs on its own; the surrogate (PPO, arXiv 1707.06347, eq. 7) with GRPO's k3 term is
written out, the clip and AdamW are torch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.parts.layouts.cases import (
    ADAM,
    CLIP,
    KL_COEF,
    MAX_GRAD_NORM,
    TEMPERATURE,
    model_folder,
    updates,
)
from easyrl.schema import RolloutGroup


class Gold(NamedTuple):
    """Of the whole batch; tensors in fp64, by Hugging Face's names."""

    logprobs: dict[tuple[int, int], Tensor]  # by prompt and sample, of all its tokens
    gradients: dict[str, Tensor]  # of the first update, after the clip
    grad_norms: list[float]  # of each update, before it
    weights: dict[str, Tensor]  # after the last update


def gold(folder: Path, tied: bool) -> Gold:
    """With the models in ``folder``."""
    policy, old, reference = (
        AutoModelForCausalLM.from_pretrained(model_folder(folder, name, tied), dtype=torch.float64)
        for name in ("policy", "policy", "reference")
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=ADAM["learning_rate"], eps=ADAM["adam_eps"], weight_decay=0.0
    )
    logprobs = {
        (group.prompt.index, sample): _logprobs(old, group, sample).detach()
        for groups in updates()
        for group in groups
        for sample in range(len(group.completions))
    }
    gradients: dict[str, Tensor] = {}
    norms = []
    for groups in updates():
        loss = _loss(groups, policy, old, reference)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)))
        if not gradients:
            found = {name: p.grad for name, p in policy.named_parameters()}
            gradients = {name: g.clone() for name, g in found.items() if g is not None}
        optimizer.step()
    weights = {name: p.detach() for name, p in policy.named_parameters()}
    return Gold(logprobs, gradients, norms, weights)


def _loss(
    groups: list[RolloutGroup],
    policy: PreTrainedModel,
    old: PreTrainedModel,
    reference: PreTrainedModel,
) -> Tensor:
    """The mean over the trained tokens."""
    losses, num_tokens = [], 0
    for group in groups:
        rewards = np.array([score.reward for score in group.scores], dtype=np.float32)
        centred = rewards - rewards.mean()
        advantages = centred / (rewards.std(ddof=1) + 1e-4)
        for sample, advantage in enumerate(advantages.tolist()):
            mask = torch.from_numpy(group.completions[sample].loss_mask)
            own = _logprobs(policy, group, sample)[mask]
            with torch.no_grad():
                before = _logprobs(old, group, sample)[mask]
                base = _logprobs(reference, group, sample)[mask]
            ratio = (own - before).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            k3 = (base - own).exp() - (base - own) - 1
            losses.append((-surrogate + KL_COEF * k3).sum())
            num_tokens += int(mask.sum())
    return torch.stack(losses).sum() / num_tokens


def _logprobs(model: PreTrainedModel, group: RolloutGroup, sample: int) -> Tensor:
    prompt = torch.from_numpy(group.prompt.token_ids).long()
    response = torch.from_numpy(group.completions[sample].token_ids).long()
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, response[:, None]).squeeze(1)
