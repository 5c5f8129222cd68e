"""The optimizer that ``trainer.optimizer`` names, over parameter groups of what is trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from easyrl.config import ConfigError, TrainerConfig
from easyrl.engines.deepspeed.eight_bit import eight_bit_adamw
from easyrl.engines.deepspeed.late_denominator import LateScalarOptimizer
from easyrl.engines.deepspeed.muon import IS_MUON, MuonWithAdamW
from easyrl.models.critic import CriticModel
from easyrl.models.policy_model import PolicyModel

MUON_MOMENTUM = 0.95


def make_optimizer(
    trainer: TrainerConfig, policy: PolicyModel | CriticModel, device: str
) -> torch.optim.Optimizer:
    """For ``deepspeed.initialize``; with ZeRO-0 behind the late scalar.

    ``device``: the kind, such as ``cuda``. Raises ``ConfigError`` for a package that is not
    installed or too old, or weights that the optimizer cannot step.
    """
    settings: dict[str, Any] = {
        "lr": trainer.learning_rate,
        "betas": trainer.adam_betas,
        "eps": trainer.adam_eps,
    }
    fused: dict[str, Any] = {"fused": fused_adam(device, offload=trainer.offload_optimizer)}
    optimizer: torch.optim.Optimizer
    if trainer.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(
                f"trainer.optimizer: muon is not in torch {torch.__version__}; install torch 2.9 "
                "or later, or use adamw"
            )
        optimizer = MuonWithAdamW(
            muon_groups(policy, trainer),
            momentum=trainer.muon_momentum or MUON_MOMENTUM,
            adamw=settings | fused,
        )
    else:
        groups = parameter_groups(trained(policy), trainer.weight_decay)
        if trainer.optimizer == "adam8bit":
            optimizer = eight_bit_adamw(groups, **settings)
        else:
            optimizer = torch.optim.AdamW(groups, **settings, **fused)
    if trainer.zero_stage > 0:
        return optimizer
    return LateScalarOptimizer(optimizer, max_norm=trainer.max_grad_norm)


def fused_adam(device: str, *, offload: bool) -> bool | None:
    """Whether AdamW steps with torch's fused kernel; None is torch's own choice.

    On CUDA: one kernel reads and writes each number once and has no temporaries, whereas torch's
    choice there has some of the size of a moment. DeepSpeed's own fused Adam is compiled with nvcc
    when it is first used, which many machines do not have. With the optimizer's state in host
    memory: on the CPU, for speed. Elsewhere the bits stay those of torch's choice.
    """
    return True if device == "cuda" or offload else None


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def parameter_groups(
    parameters: Collection[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases do not; no group is empty."""
    matrices = [p for p in parameters if _num_dimensions(p) >= 2]
    others = [p for p in parameters if _num_dimensions(p) < 2]
    if not parameters:
        return []
    if weight_decay == 0:
        return [{"params": matrices + others, "weight_decay": 0.0}]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(policy: PolicyModel | CriticModel, trainer: TrainerConfig) -> list[dict[str, Any]]:
    """AdamW's groups of embeddings, output projection, norms and biases, then Muon's of the other
    matrices.

    Raises ``ConfigError`` for a weight of more than two dimensions: experts that are one tensor.
    """
    outer = {
        id(parameter)
        for module in (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())
        for parameter in module.parameters()
    }
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and parameter.ndim > 2:
            raise ConfigError(
                f"trainer.optimizer: muon steps matrices, but {name} has {parameter.ndim} "
                "dimensions (experts in one tensor); use adamw or adam8bit"
            )
    everything = trained(policy)
    matrices = [p for p in everything if p.ndim == 2 and id(p) not in outer]
    others = [p for p in everything if p.ndim < 2 or id(p) in outer]
    groups = [
        group | {IS_MUON: False, "lr": trainer.learning_rate}
        for group in parameter_groups(others, trainer.weight_decay)
    ]
    if matrices:
        rate = trainer.muon_learning_rate or trainer.learning_rate
        decay = {"weight_decay": trainer.weight_decay}
        groups.append({"params": matrices, IS_MUON: True, "lr": rate} | decay)
    return groups


def _num_dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty vector in its place."""
    shape = parameter.ds_shape if is_zero_param(parameter) else parameter.shape  # type: ignore[attr-defined]
    return len(shape)
