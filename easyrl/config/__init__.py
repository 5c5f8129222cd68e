"""The run's configuration: a strict tree of sections, its checks, and its YAML file."""

# ruff: noqa: F401 (the names that other rooms import from here)
from __future__ import annotations

from typing import Literal, Self

from pydantic import PrivateAttr, model_validator

from easyrl.config.alarms import AlarmsConfig
from easyrl.config.base import ConfigError, Section
from easyrl.config.critic import CriticConfig
from easyrl.config.data import DataConfig, DatasetConfig, FieldsConfig, ToolParserName
from easyrl.config.environments import (
    EnvironmentConfig,
    HistoryMode,
    OnFailure,
    ToolsConfig,
    environment_contradictions,
)
from easyrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, set_key
from easyrl.config.inference import EndpointConfig, InferenceConfig, LaunchConfig, endpoint_url
from easyrl.config.ledger import CheckpointConfig, JournalConfig
from easyrl.config.metrics import MetricsConfig
from easyrl.config.model import LoraConfig, ModelConfig
from easyrl.config.parallel import ParallelConfig, parallel_contradictions
from easyrl.config.recipe import RecipeConfig
from easyrl.config.rewards import RewardConfig, ScoringConfig
from easyrl.config.rollout import RolloutConfig, SamplingConfig, rollout_contradictions
from easyrl.config.run import RunConfig
from easyrl.config.samples import SamplesConfig
from easyrl.config.secrets import KeyPath
from easyrl.config.timeline import TimelineConfig
from easyrl.config.trainer import TrainerConfig, trainer_contradictions
from easyrl.config.watchdog import WatchdogConfig
from easyrl.config.weight_sync import SHARED_MEMORY, WeightSyncConfig


class Config(Section):
    """The whole tree, and the checks between sections."""

    # rollouts: prompts are answered by endpoints; records: completions are given with their prompts
    # (``config/records.py``)
    source: Literal["rollouts", "records"] = "rollouts"
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    inference: InferenceConfig
    rewards: list[RewardConfig] = []  # what recipes make advantages of; few need none
    scoring: ScoringConfig = ScoringConfig()
    environments: list[EnvironmentConfig] = []  # none: a prompt is answered once
    recipe: RecipeConfig = RecipeConfig()
    trainer: TrainerConfig = TrainerConfig()
    parallel: ParallelConfig = ParallelConfig()
    critic: CriticConfig = CriticConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    samples: SamplesConfig = SamplesConfig()
    timeline: TimelineConfig = TimelineConfig()
    metrics: MetricsConfig = MetricsConfig()
    # by path of the value: what the file says instead of it, ${oc.env:NAME}
    _expressions: dict[KeyPath, str] = PrivateAttr(default_factory=dict)
    _preset: str | None = PrivateAttr(default=None)  # that recipe.name named

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = rollout_contradictions(self.rollout)
        if self.model.checkpoint_every > 1 and self.model.recomputed == "none":
            problems.append(
                "model.checkpoint_every: has no effect without checkpointing; remove it, or set "
                "model.activation_checkpointing to layer or selective"
            )
        is_scored = bool(self.rewards or self.environments)
        if self.source == "rollouts" and self.evaluation is not None and not is_scored:
            problems.append(
                "evaluation: has nothing to measure without rewards; add one, or environments, or "
                "remove it"
            )
        if self.samples.console_every and not self.run.console:
            problems.append(
                "samples.console_every: has no effect with run.console: false; remove it, or set "
                "run.console to true"
            )
        problems += trainer_contradictions(self.trainer, self.model, self.run)
        problems += parallel_contradictions(
            self.parallel, self.model, self.trainer, self.critic, self.weight_sync, self.source
        )
        if self.weight_sync.lora != "merged" and self.model.lora is None:
            problems.append(
                "weight_sync.lora: has no effect without adapters; remove it, or set model.lora"
            )
        labels = [reward.label for reward in self.rewards]
        if len(set(labels)) != len(labels):
            problems.append(f"rewards: two are called the same ({labels}); set log_as of one")
        if self.data.tool_parser != "auto" and not self.environments:
            problems.append(
                "data.tool_parser: is for environments, and there are none; remove it, or add one"
            )
        problems += environment_contradictions(self.environments, self.rewards, self.scoring)
        if problems:
            raise ValueError("\n".join(problems))
        return self
