"""A model with a random adapter that peft wrote, and the batch's gradient through plain peft."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import peft
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from easyrl.config import LoraConfig, ModelConfig
from easyrl.engines.weight_names import adapter_weights
from easyrl.models.loading import load_policy_model
from easyrl.models.lora import adapter_layers, factors
from easyrl.models.policy_model import PolicyModel
from easyrl.recipes.estimators import group_advantages
from tests.easyrl.engines.engine_cases import (
    CLIP,
    ENTROPY_COEF,
    KL_COEF,
    dense_logprobs,
    make_groups,
)
from tests.tiny_models import Family, save_tiny_model

ATTENTION_ONLY = ("q_proj", "o_proj")  # all that the mixture of experts has in each layer
LORA = LoraConfig(rank=3, alpha=7.0)
SEED = 13
# by kind, the ZeRO stages and dtypes of a quick run and of all
QUICK = {
    "gradient": ((1, "fp32"), (3, "fp32")),
    "recomputed": ((3, "fp32"),),
    "updates": ((2, "fp32"),),
    "behaviour": ((2, "bf16"), (3, "fp32")),
}
EVERY = {
    "gradient": tuple((stage, "fp32") for stage in range(4)),
    "recomputed": ((2, "fp32"), (3, "fp32")),
    "updates": ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")),
    "behaviour": ((0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")),
}


def lora_of(family: Family) -> LoraConfig:
    moe = family == "qwen3_moe"
    return LORA.model_copy(update={"target_modules": list(ATTENTION_ONLY)}) if moe else LORA


def prepare(folder: Path, family: Family = "qwen3", *, tied: bool = True) -> Path:
    """``folder/base`` and ``folder/adapter``, which is far enough from zero to be seen."""
    save_tiny_model(folder / "base", family, tied=tied, num_hidden_layers=2)
    lora = lora_of(family)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules
    )
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), settings
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder / "adapter")
    return folder


def model_config(folder: Path, family: Family = "qwen3", **settings: object) -> ModelConfig:
    values = {"path": folder / "base", "dtype": "fp32", "lora": lora_of(family)}
    return ModelConfig(**(values | settings))


def load(config: ModelConfig, adapter: Path, dtype: torch.dtype | None = None) -> PolicyModel:
    """Our policy with the values of peft's adapter."""
    policy = load_policy_model(config, dtype=dtype, seed=SEED)
    values = load_file(adapter / "adapter_model.safetensors")
    assert values.keys() == dict(adapter_weights(policy.model, is_writer=True)).keys()
    with torch.no_grad():
        for name, layer in adapter_layers(policy.model).items():
            a, b = factors(layer)
            a.copy_(values[f"base_model.model.{name}.lora_A.weight"])
            b.copy_(values[f"base_model.model.{name}.lora_B.weight"])
    return policy


def through_peft(folder: Path) -> peft.PeftModel:
    """The same in fp64, without any of our code."""
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float64, experts_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).double()


class Gold(NamedTuple):
    """Dense fp64 gradients of the whole batch, divided by its number of trained tokens."""

    gradients: dict[str, Tensor]  # after the clip, by peft's saved name
    grad_norm: float  # before it
    reference: Tensor  # log-probabilities of group 0's first response, [R]


def dense_gold(folder: Path, max_grad_norm: float) -> Gold:
    """Each sequence on its own; the reference is peft's model with the adapter disabled."""
    policy = through_peft(folder)
    losses, references, trained = [], [], 0
    for group in make_groups():
        advantages = group_advantages(group.rewards, "group_std")
        for completion, advantage in zip(group.completions, advantages, strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            logp, entropy = dense_logprobs(policy, *ids)
            with torch.no_grad(), policy.disable_adapter():
                reference, _ = dense_logprobs(policy, *ids)
            ratio, log_ratio = torch.exp(logp - logp.detach()), reference - logp
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            k3 = torch.exp(log_ratio) - log_ratio - 1
            mask = torch.from_numpy(completion.loss_mask)
            losses.append(((-surrogate + KL_COEF * k3 - ENTROPY_COEF * entropy) * mask).sum())
            references.append(reference)
            trained += int(np.sum(completion.loss_mask))
    (torch.stack(losses).sum() / trained).backward()
    adapter = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapter)
    norm = float(torch.nn.utils.clip_grad_norm_(adapter.values(), max_grad_norm))
    gradients = {name.replace(".default.", "."): p.grad for name, p in adapter.items()}
    return Gold(gradients, norm, references[0])
