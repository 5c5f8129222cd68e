"""A batch for gradient comparisons: its models, its dense fp64 gradient, its packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from easyrl.recipes.estimators import group_advantages
from easyrl.schema import MicroBatch, RolloutGroup
from tests.recipes import batch_denominator, pack_groups
from tests.tiny_models import random_group, save_tiny_model

AGGREGATIONS = ("sequence", "token", "constant")
MAX_TOKENS = 16  # of a response
MAX_GRAD_NORM = 0.7  # below the batch's, so that the clip acts
CLIP, KL_COEF, ENTROPY_COEF, TEMPERATURE = 0.2, 0.1, 0.01, 0.8


def prepare(folder: Path) -> None:
    """Three different policies of one shape, and a mixture of experts."""
    for seed, name in enumerate(("policy", "reference", "old")):
        save_tiny_model(folder / name, "qwen3", tied=True, seed=seed)
    # old and policy differ a little, so that ratios lie on both sides of the clip
    policy, old = (AutoModelForCausalLM.from_pretrained(folder / n) for n in ("policy", "old"))
    with torch.no_grad():
        for p, o in zip(policy.parameters(), old.parameters(), strict=True):
            o.lerp_(p, 0.85)
    old.save_pretrained(folder / "old")
    save_tiny_model(folder / "moe", "qwen3_moe", tied=False)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')


def make_groups() -> list[RolloutGroup]:
    rng = np.random.default_rng(11)
    shapes = ((9, [4, 11, 1]), (3, [7, 2, 12]), (14, [5, 5, 6]), (6, [10, 3, 1]), (8, [2, 9, 4]))
    return [
        random_group(rng, prompt, responses, index=i, masked=0.2)
        for i, (prompt, responses) in enumerate(shapes)
    ]


class Gold(NamedTuple):
    """Dense fp64 gradients of the whole batch."""

    gradients: dict[str, Tensor]  # after the clip, by save_pretrained name
    grad_norm: float  # before it


def dense_gold(folder: Path, aggregation: str, max_grad_norm: float = MAX_GRAD_NORM) -> Gold:
    """Each sequence on its own through plain Hugging Face models; TRL's formulas; torch's clip."""
    policy, reference, old = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", "reference", "old")
    )
    groups = make_groups()
    sequences = []
    for group in groups:
        advantages = group_advantages(group.rewards, "group_std")
        for completion, advantage in zip(group.completions, advantages, strict=True):
            mask = torch.from_numpy(completion.loss_mask)
            ids = group.prompt.token_ids, completion.token_ids
            logp, entropy = dense_logprobs(policy, *ids)
            with torch.no_grad():
                old_logp, reference_logp = (dense_logprobs(m, *ids)[0] for m in (old, reference))
            ratio, log_ratio = torch.exp(logp - old_logp), reference_logp - logp
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            k3 = torch.exp(log_ratio) - log_ratio - 1
            per_token = -surrogate + KL_COEF * k3 - ENTROPY_COEF * entropy
            sequences.append((per_token * mask).sum() * token_weight(aggregation, mask))
    if aggregation == "token":
        trained = sum(int(c.loss_mask.sum()) for group in groups for c in group.completions)
        loss = torch.stack(sequences).sum() / trained
    else:
        loss = torch.stack(sequences).mean()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm))
    return Gold({name: p.grad for name, p in policy.named_parameters()}, norm)


def token_weight(aggregation: str, mask: Tensor) -> float:
    """Rounded to float32, as a row's weights are: an input like the advantages, not a result."""
    length = {"sequence": max(1, int(mask.sum())), "token": 1, "constant": MAX_TOKENS}[aggregation]
    return float(np.float32(1 / length))


def dense_logprobs(
    model: PreTrainedModel, prompt_ids: np.ndarray, response_ids: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [R] of one sequence."""
    prompt, response = (torch.from_numpy(ids).long() for ids in (prompt_ids, response_ids))
    logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, response[:, None]).squeeze(1), entropy


def streamed(
    aggregation: str, *, seed: int = 0, budgets: tuple[int, int] = (24, 60)
) -> list[MicroBatch]:
    """The batch as it may arrive: groups in random order, rows of different sizes."""
    groups = make_groups()
    order = np.random.default_rng(seed).permutation(len(groups))
    rows = []
    for start in range(0, len(groups), 2):
        chosen = [groups[i] for i in order[start : start + 2]]
        rows += pack_groups(
            chosen,
            [group_advantages(group.rewards, "group_std") for group in chosen],
            aggregation=aggregation,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
            mask_truncated=False,
            max_tokens_per_micro_batch=budgets[start // 2 % 2],
        )
    return rows


def denominator(aggregation: str) -> float:
    return batch_denominator(make_groups(), aggregation, False)  # type: ignore[arg-type]


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The worst ‖got - expected‖ / ‖expected‖ of a parameter."""
    assert got.keys() == expected.keys()
    return max(
        (
            float((got[name].double() - value.double()).norm() / value.double().norm())
            for name, value in expected.items()
        ),
        default=0.0,  # ranks that hold no weights
    )
