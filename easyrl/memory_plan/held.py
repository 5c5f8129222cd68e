"""Bytes that a rank holds all the time: weights, gradients, optimizer, frozen models, critic."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from easyrl.config import Config
from easyrl.engines.deepspeed.memory import (
    GRADIENT,
    MASTER,
    MOMENTS,
    WEIGHT,
    BytesPerParameter,
    bytes_per_parameter,
)
from easyrl.memory_plan.model_shape import ModelShape, model_shape
from easyrl.memory_plan.stages import Stage
from easyrl.recipes.recipe import Recipe

# Elements below which ZeRO-3 keeps a parameter whole (stage3_param_persistence_threshold).
PERSISTENT = 10**5


@dataclass(frozen=True)
class Held:
    """On one rank of a stage."""

    weights: float
    frozen: float  # reference, old policy, teacher
    gradients: float
    optimizer: float  # masters and moments
    critic: float
    step: float  # beside them while the optimizer steps
    host: float  # page-locked memory: what is offloaded, a checkpoint's copy


class HeldPlan:
    """What is held, stage by stage. ``num_data``: data-parallel ranks."""

    def __init__(self, config: Config, shape: ModelShape, recipe: Recipe, num_data: int) -> None:
        self._config, self._shape, self._num_data = config, shape, num_data
        self._trainer, self._lora = config.trainer, config.model.lora
        self._needs = recipe.needs
        self._size = WEIGHT[config.model.dtype]
        # of a frozen model's parameter
        self._frozen_size = self._size / (num_data if self._trainer.zero_stage == 3 else 1)
        self._use = self._per_parameter(self._trainer.zero_stage, self._trainer.optimizer)

    def on_rank(self, stage: Stage) -> Held:
        use, parameters = self._use, self._trained(stage)
        trained = sum(parameters)
        weights = trained * use.weights
        if self._lora is not None:
            weights += stage.num_parameters * self._frozen_size
        if self._trainer.zero_stage == 3:
            weights += self._size * sum(n for n in parameters if n < PERSISTENT)
        frozen, offloaded = self._frozen(stage, trained)
        critic = self._critic()
        return Held(
            weights=weights,
            frozen=frozen,
            gradients=trained * use.gradients,
            optimizer=trained * use.optimizer,
            critic=critic.device,
            step=trained * self._step(),
            host=trained * (use.host + self._checkpoint_copy()) + offloaded + critic.host,
        )

    def _per_parameter(
        self, zero_stage: Literal[0, 1, 2, 3], optimizer: Literal["adamw", "adam8bit", "muon"]
    ) -> BytesPerParameter:
        return bytes_per_parameter(
            zero_stage,
            self._config.model.dtype,
            self._num_data,
            offload_optimizer=self._trainer.offload_optimizer,
            optimizer=optimizer,
        )

    def _trained(self, stage: Stage) -> tuple[int, ...]:
        """Elements of each parameter that is trained; of adapters, of their factors."""
        if self._lora is None:
            return stage.parameters
        targets = tuple(f".{name}.weight" for name in self._lora.target_modules)
        layers = [
            shape
            for name, shape in self._shape.parameters.items()
            if name.endswith(targets) and len(shape) == 2
        ]
        return tuple(self._lora.rank * size for shape in layers for size in shape)

    def _frozen(self, stage: Stage, trained: int) -> tuple[float, float]:
        """On the device and on the host; of adapters the reference is the model below them."""
        whole = stage.num_parameters * self._frozen_size
        device = host = 0.0
        if self._needs.reference and self._lora is None:
            if self._trainer.offload_reference:
                host += whole
            else:
                device += whole
        if has_old_policy(self._config, self._needs.old_policy):
            device += whole if self._lora is None else trained * self._frozen_size
        if self._needs.teacher is not None:
            device += self._shape_at(self._needs.teacher.path).num_parameters * self._frozen_size
        return device, host

    def _critic(self) -> BytesPerParameter:
        """All its bytes, not of a parameter; none without one."""
        if not self._needs.critic:
            return BytesPerParameter(0, 0, 0, 0)
        shape = self._shape_at(self._config.critic.path or self._config.model.path)
        own = sum(prod(size) for name, size in shape.parameters.items() if "lm_head" not in name)
        stage = self._trainer.zero_stage
        use = self._per_parameter(2 if stage == 3 else stage, "adamw")
        snapshot = self._size if self._trainer.updates_per_batch > 1 else 0
        return BytesPerParameter(
            own * (use.weights + snapshot), own * use.gradients, own * use.optimizer, own * use.host
        )

    def _shape_at(self, path: object) -> ModelShape:
        return model_shape(self._config.model.model_copy(update={"path": path}))

    def _step(self) -> float:
        """Per parameter: DeepSpeed copies a rank's gradients for the optimizer (docs/memory.md)."""
        stage, dtype = self._trainer.zero_stage, self._config.model.dtype
        copies = stage == 2 or (stage == 1 and dtype == "fp32")
        return GRADIENT / self._num_data if copies else 0.0

    def _checkpoint_copy(self) -> float:
        """Per parameter, of masters and moments."""
        return (MASTER + MOMENTS[self._trainer.optimizer]) / self._num_data


def has_old_policy(config: Config, is_needed: bool) -> bool:
    """Whether there are weights of an old policy; ``is_needed`` by the recipe."""
    trainer = config.trainer
    return trainer.old_policy == "lagged" or (is_needed and trainer.updates_per_batch > 1)
