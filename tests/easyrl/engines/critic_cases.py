"""A batch for PPO on real engines: its groups, its critic, and dense fp64 gradients of both models.

The gold runs each sequence alone through plain Hugging Face models, of which peft makes those with
adapters, with the double sum of generalised advantages; nothing of ``easyrl`` but the groups is
used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from easyrl.schema import RolloutGroup
from tests.easyrl.engines.engine_cases import MAX_GRAD_NORM, dense_logprobs, make_groups
from tests.easyrl.engines.engine_cases import prepare as prepare_models
from tests.tiny_models import save_tiny_model

GAE_LAMBDA, KL_COEF = 0.95, 0.1
STAGES = (0, 1, 2, 3)
LORA = {"rank": 2, "alpha": 3.0}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def prepare(folder: Path) -> None:
    """The models of ``engine_cases``, a critic whose value head is not zero, and adapters of both,
    far enough from zero to be seen.
    """
    prepare_models(folder)
    for name, tied in (("critic", True), ("untied_critic", False)):
        save_tiny_model(folder / name, "qwen3", tied=tied, seed=9)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        weights.pop("lm_head.weight", None)  # as a run exports it
        head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) / 8
        save_file(weights | {"score.weight": head}, file, metadata={"format": "pt"})
    for seed, name in enumerate(("policy", "critic")):
        settings = peft.LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=TARGETS)
        model = peft.get_peft_model(_plain(folder / name, torch.float32), settings)
        torch.manual_seed(seed)
        for parameter in _adapter(model):
            torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(folder / f"{name}_adapter")


def _plain(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _with_adapter(folder: Path, name: str) -> Any:
    """In fp64, its layers peft's; the adapter alone is trained."""
    adapter = folder / f"{name}_adapter"
    model = peft.PeftModel.from_pretrained(
        _plain(folder / name, torch.float64), adapter, is_trainable=True
    )
    return model.double().get_base_model()


def _adapter(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_" in name]


class DenseModel(NamedTuple):
    gradients: dict[str, Tensor]  # after the clip, by the name of a file's weight; of peft's
    grad_norm: float  # before it


class Dense(NamedTuple):
    policy: DenseModel
    critic: DenseModel
    values: dict[tuple[int, int], Tensor]  # by prompt and sample, [R]
    explained_variance: float


def dense_gold(folder: Path, *, whiten: bool, with_kl: bool, lora: bool = False) -> Dense:
    """One step, at ratio 1 and values that are the old ones; with ``lora`` of the adapters."""
    policy, critic = (
        _with_adapter(folder, name) if lora else _plain(folder / name, torch.float64)
        for name in ("policy", "critic")
    )
    # the policy as the run began, or without its adapter
    reference = _plain(folder / "policy", torch.float64)
    head = load_file(folder / "critic" / "model.safetensors")["score.weight"].double()
    head.requires_grad_()
    logps, advantages, returns, values = [], [], [], []
    by_response = {}
    for group in make_groups():
        for sample, completion in enumerate(group.completions):
            ids = group.prompt.token_ids, completion.token_ids
            mask = torch.from_numpy(completion.loss_mask)
            logp, _ = dense_logprobs(policy, *ids)
            with torch.no_grad():
                reference_logp, _ = dense_logprobs(reference, *ids)
            both = torch.cat([torch.from_numpy(x).long() for x in ids])
            hidden = critic.base_model(both[None]).last_hidden_state[0]
            value = (hidden[len(ids[0]) - 1 : -1] @ head.T).squeeze(-1)
            by_response[group.prompt.index, sample] = value.detach()
            sampled = torch.from_numpy(completion.logprobs).double()
            rewards = -KL_COEF * (sampled - reference_logp) if with_kl else torch.zeros(len(mask))
            own = _advantages(rewards[mask].double(), float(group.rewards[sample]), value[mask])
            logps.append(logp[mask])
            advantages.append(own)
            returns.append(own + value[mask].detach())
            values.append(value[mask])
    a, r, v = torch.cat(advantages), torch.cat(returns), torch.cat(values)
    if whiten:
        a = (a - a.mean()) / torch.sqrt(a.var() + 1e-8)
    (-(a * torch.cat(logps)).mean()).backward()
    (0.5 * (v - r).square().mean()).backward()
    error = (r - v.detach()).var(correction=0)
    named = dict(critic.named_parameters()) | {"score.weight": head}
    named.pop("lm_head.weight", None)
    return Dense(
        _clipped(dict(policy.named_parameters())),
        _clipped(named),
        by_response,
        float(1 - error / r.var(correction=0)),
    )


def _advantages(rewards: Tensor, score: float, values: Tensor) -> Tensor:
    """[n], of one response's trained tokens."""
    if len(rewards) == 0:
        return rewards
    rewards = rewards.clone()
    rewards[-1] += score
    states = [*values.detach().tolist(), 0.0]
    deltas = [float(r) + states[t + 1] - states[t] for t, r in enumerate(rewards)]
    sums = [
        sum(GAE_LAMBDA**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    return torch.tensor(sums, dtype=torch.float64)


def _clipped(parameters: dict[str, Tensor]) -> DenseModel:
    norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM))
    return DenseModel({n: p.grad for n, p in parameters.items() if p.grad is not None}, norm)


def shares(size: int) -> list[list[list[RolloutGroup]]]:
    """By rank what its stream hands out, drain by drain: the first rank has one group."""
    groups = make_groups()
    if size == 1:
        return [[groups[3:], groups[:3]]]
    return [[groups[2:3]], [groups[3:], groups[:2]]]
