"""Our configuration as DeepSpeed's, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from easyrl.config import Config, ConfigError, TrainerConfig

# Elements reduced together. DeepSpeed's own default, half a billion, is buffers of 3 GB and more.
REDUCE_BUCKET = 50_000_000


def training_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration of the policy.

    Accumulation is ours: ``backward`` accumulates, ``step`` reduces, and a batch may have any
    number of micro-batches.
    """
    trainer = config.trainer
    zero: dict[str, Any] = {"stage": trainer.zero_stage}
    if trainer.zero_stage > 0:
        zero["reduce_bucket_size"] = REDUCE_BUCKET
    if trainer.zero_stage in (1, 2):
        zero["overlap_comm"] = False  # refused by stage 1 with our own accumulation
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings = _common(config) | {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no compiler
        # Those that its list lacks are tested here, for each stage (test_optimizers.py).
        "zero_allow_untested_optimizer": trainer.optimizer != "adamw",
        # Stage 0 is clipped by LateScalarOptimizer, after the division.
        "gradient_clipping": trainer.max_grad_norm if trainer.zero_stage > 0 else 0.0,
        "managed_gradient_accumulation": False,
    }
    if config.model.dtype == "bf16":
        # The gradients of a batch are summed over micro-batches and ranks in fp32.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return settings


def frozen_config(config: Config, *, offload: bool) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is only run, sharded by ZeRO-3.

    Nothing stays gathered after a forward, so that the shards are the whole truth.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
    }
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return _common(config) | {"zero_optimization": zero}


def _common(config: Config) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {
            "enabled": config.model.dtype == "bf16",
            "check_grad_overflow": True,
            # ZeRO-1 adds a parameter's bf16 gradient to the fp32 one as soon as it is there, and
            # frees it; else all of them stay until the step, 2 bytes a parameter
            "immediate_grad_update": True,
        },
        "steps_per_print": 10**9,
    }


def schedule_factor(trainer: TrainerConfig, total_steps: int | None) -> Callable[[int], float]:
    """Factor on the learning rate of optimizer step ``step`` (from 0): warm-up, then the schedule.

    Linear warm-up reaches 1 at the last warm-up step; ``linear`` and ``cosine`` fall from 1 towards
    ``min_lr_ratio``, which they would reach at step ``total_steps``: no step is taken at rate 0.
    """
    warmup, lowest = trainer.warmup_steps, trainer.min_lr_ratio
    if trainer.lr_schedule != "constant" and total_steps is None:
        raise ConfigError(
            f"trainer.lr_schedule: {trainer.lr_schedule} needs an end; set trainer.max_steps"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if trainer.lr_schedule == "constant":
            return 1.0
        assert total_steps is not None
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if trainer.lr_schedule == "linear":
            return lowest + (1 - lowest) * (1 - progress)
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def critic_config(config: Config) -> Config:
    """The configuration of the critic, as if it were the policy: AdamW on the policy's schedule.

    ZeRO 2 at most (``critic.py``).
    """
    critic, trainer = config.critic, config.trainer
    own = {
        "learning_rate": critic.learning_rate,
        "weight_decay": critic.weight_decay,
        "max_grad_norm": critic.max_grad_norm,
        "optimizer": "adamw",
        "zero_stage": min(trainer.zero_stage, 2),
    }
    sections = {
        "trainer": trainer.model_copy(update=own),
        "model": config.model.model_copy(update={"path": critic.path or config.model.path}),
    }
    return config.model_copy(update=sections)
