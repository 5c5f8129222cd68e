"""A model, its optimizer and its schedule as one of DeepSpeed's engines, behind the late scalar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from easyrl.config import Config
from easyrl.engines.deepspeed.config import training_config
from easyrl.engines.deepspeed.late_denominator import require_late_scalar
from easyrl.engines.deepspeed.optimizers import make_optimizer
from easyrl.engines.process_group import quiet
from easyrl.models.critic import CriticModel
from easyrl.models.policy_model import PolicyModel


def initialise(
    config: Config, model: Any, factor: Callable[[int], float], mpu: object | None = None
) -> deepspeed.DeepSpeedEngine:
    """``factor``: of the learning rate, by optimizer step. Collective.

    ``mpu``: the process groups of a model that is split (DeepSpeed's *model parallel unit*).
    """
    optimizer = make_optimizer(config.trainer, model, get_accelerator().device_name())
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=partial(LambdaLR, lr_lambda=factor),
            config=training_config(config),
            mpu=mpu,
        )
    require_late_scalar(engine.optimizer)
    return engine


def trained_parameters(model: PolicyModel | CriticModel) -> dict[str, nn.Parameter]:
    """What is trained, by a name that depends on neither ranks nor ZeRO stage."""
    return {n: p for n, p in model.model.named_parameters() if p.requires_grad}


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter; a ZeRO-3 parameter's own tensor is empty between uses."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
