"""One late scalar per optimizer step: divide what was accumulated, then measure, clip and step.

DeepSpeed has no such call. Each of its optimizers has a place where the division comes before the
norm; where it would be ignored in silence (BF16_Optimizer's loss scale) another one is used.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from easyrl.config import ConfigError


class LateScalarOptimizer(torch.optim.Optimizer):
    """An optimizer for ZeRO-0, where DeepSpeed has none of its own, behind the late scalar.

    ``step`` divides the reduced gradients by ``divisor``, measures, clips, and lets ``optimizer``
    step; it does nothing more where the norm is not finite. DeepSpeed's engine then reads
    ``overflow`` and ``_global_grad_norm``. Parameter groups and state are ``optimizer``'s.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, max_norm: float) -> None:
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.optimizer = optimizer  # by the name that DeepSpeed's have it
        self.max_norm = max_norm  # 0: no clipping
        self.divisor = 1.0
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in params]
        torch._foreach_div_(gradients, self.divisor)
        norm = get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not bool(torch.isfinite(norm))
        if self.overflow:
            return
        if self.max_norm > 0:
            clip_grads_with_norm_(params, self.max_norm, norm)
        self.optimizer.step()


# In each of them the gradients of a step are divided, and a test has seen it.
DIVIDED = (
    LateScalarOptimizer,
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
)


def require_late_scalar(optimizer: Any) -> None:
    """Raises ``ConfigError`` for an optimizer of DeepSpeed that ``step_divided`` cannot divide."""
    if not isinstance(optimizer, DIVIDED):
        raise ConfigError(
            f"trainer.zero_stage: DeepSpeed steps with {type(optimizer).__name__}, which is not "
            "known to divide the gradients before they are measured and clipped; use the version "
            "of DeepSpeed that setup.py asks for"
        )


def step_divided(engine: deepspeed.DeepSpeedEngine, divisor: float) -> tuple[float, bool]:
    """Divides the accumulated gradients (averaged over ranks) by ``divisor``, clips and steps.

    Collective; every rank has run at least one backward.

    Returns:
        The norm before the clip, and whether the step was taken; it is not where the norm is not
        finite, and then weights, optimizer state and schedule are as before.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, LateScalarOptimizer):
        optimizer.divisor = divisor
        engine.step()
    elif isinstance(optimizer, BF16_Optimizer):
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
        engine.step()
    else:
        optimizer.loss_scale = divisor
        engine.step()
        optimizer.loss_scale = 1.0  # backward would multiply by it
    return float(engine.get_global_grad_norm()), engine.was_step_applied()
