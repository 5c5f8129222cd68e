"""A policy with teachers of other families and sizes, and the dense gradient of distillation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.recipes.distillation import Distillation
from easyrl.recipes.groups import trained_groups
from easyrl.schema import MicroBatch, RolloutGroup
from tests.easyrl.engines.engine_cases import TEMPERATURE, Gold, make_groups
from tests.recipes import run_settings
from tests.tiny_models import Family, save_tiny_model

# A larger Llama with a projection of its own, and a smaller Qwen2, whose is its embedding.
TEACHERS: dict[str, tuple[Family, bool, int]] = {
    "larger": ("llama", False, 48),
    "smaller": ("qwen2", True, 24),
}


def prepare(folder: Path) -> Path:
    save_tiny_model(folder / "policy", "qwen3", tied=True)
    for name, (family, tied, hidden_size) in TEACHERS.items():
        sizes = {"hidden_size": hidden_size, "head_dim": hidden_size // 4}
        save_tiny_model(folder / name, family, tied=tied, seed=3, num_hidden_layers=3, **sizes)
    return folder


def recipe_of(folder: Path, teacher: str, divergence: str, credit: str = "token") -> Distillation:
    return Distillation(teacher=folder / teacher, divergence=divergence, credit=credit)  # type: ignore[arg-type]


def rows_of(recipe: Distillation, *, seed: int = 0) -> list[MicroBatch]:
    """The groups packed in another order, into rows of different sizes."""
    groups = make_groups()
    order = np.random.default_rng(seed).permutation(len(groups))
    rows = []
    for start, budget in zip(range(0, len(groups), 2), (24, 60, 40), strict=True):
        chosen = [groups[i] for i in order[start : start + 2]]
        trained = trained_groups(recipe, run_settings(), chosen)
        rows += pack_groups(trained, max_tokens_per_micro_batch=budget, keep_order=False)
    return rows


def denominator_of(recipe: Distillation) -> float:
    return recipe.denominator(make_groups(), run_settings())


def dense_gold(
    folder: Path, teacher: str, divergence: str, max_grad_norm: float, credit: str = "token"
) -> tuple[Gold, float]:
    """fp64, each sequence alone through plain Hugging Face models; the clipped gradient, and the
    mean divergence."""
    policy, its = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", teacher)
    )
    losses: list[Tensor] = []
    costs: list[Tensor] = []
    for group in make_groups():
        for sample in range(len(group.completions)):
            own = _logits(policy, group, sample).log_softmax(-1)
            with torch.no_grad():
                other = _logits(its, group, sample).log_softmax(-1)
            completion = group.completions[sample]
            labels = torch.from_numpy(completion.token_ids).long()[:, None]
            k = (own - other).gather(1, labels).squeeze(1)
            kl = (own.exp() * (own - other)).sum(-1)
            logp = own.gather(1, labels).squeeze(1)
            mask = torch.from_numpy(completion.loss_mask)
            cost = (kl if divergence == "full" else k).detach()
            to_go = (cost * mask).flip(0).cumsum(0).flip(0)
            if divergence == "full":
                loss = kl + (logp * (to_go - cost) if credit == "sequence" else 0.0)
            else:
                loss = logp * (to_go if credit == "sequence" else cost)
            losses.append((loss * mask).sum())
            costs.append((cost * mask).sum())
    num_tokens = sum(int(c.loss_mask.sum()) for g in make_groups() for c in g.completions)
    (torch.stack(losses).sum() / num_tokens).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm))
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return Gold(gradients, norm), float(torch.stack(costs).sum() / num_tokens)


def _logits(model: torch.nn.Module, group: RolloutGroup, sample: int) -> Tensor:
    """[R, V], at the temperature."""
    prompt = torch.from_numpy(group.prompt.token_ids).long()
    response = torch.from_numpy(group.completions[sample].token_ids).long()
    logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
    return logits / TEMPERATURE
