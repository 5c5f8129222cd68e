"""The run's configuration: a strict tree of sections, its checks, and its YAML file."""

# ruff: noqa: F401 (the names that other rooms import from here)
from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from easyrl.config.base import ConfigError, Section
from easyrl.config.data import DataConfig, DatasetConfig, FieldsConfig
from easyrl.config.inference import (
    SHARED_MEMORY,
    InferenceConfig,
    LaunchConfig,
    WeightSyncConfig,
    endpoint_url,
)
from easyrl.config.model import LoraConfig, ModelConfig, model_contradictions
from easyrl.config.recipe import RecipeConfig
from easyrl.config.rewards import RewardConfig, ScoringConfig, reward_contradictions
from easyrl.config.rollout import (
    EvaluationConfig,
    RolloutConfig,
    SamplingConfig,
    rollout_contradictions,
)
from easyrl.config.run import CheckpointConfig, JournalConfig, RunConfig, WatchdogConfig
from easyrl.config.trainer import TrainerConfig, trainer_contradictions


class Config(Section):
    """The whole tree, and the checks between sections."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    inference: InferenceConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    recipe: RecipeConfig = RecipeConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = [
            *rollout_contradictions(self.rollout),
            *model_contradictions(self.model),
            *trainer_contradictions(self.trainer, self.model, self.run),
            *reward_contradictions(self.rewards),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self
