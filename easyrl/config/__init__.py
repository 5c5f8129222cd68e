"""The run's configuration: a strict tree of sections, its checks, and its YAML file."""

from easyrl.config.data import DataConfig, DatasetConfig, FieldsConfig
from easyrl.config.errors import ConfigError
from easyrl.config.evaluation import EvaluationConfig
from easyrl.config.inference import InferenceConfig, LaunchConfig, endpoint_url
from easyrl.config.ledger import CheckpointConfig, JournalConfig
from easyrl.config.model import LoraConfig, ModelConfig
from easyrl.config.recipe import RecipeConfig
from easyrl.config.rewards import RewardConfig, ScoringConfig
from easyrl.config.rollout import RolloutConfig, SamplingConfig
from easyrl.config.run import RunConfig
from easyrl.config.trainer import TrainerConfig
from easyrl.config.tree import Config
from easyrl.config.watchdog import WatchdogConfig
from easyrl.config.weight_sync import SHARED_MEMORY, WeightSyncConfig

__all__ = [
    "SHARED_MEMORY",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DatasetConfig",
    "EvaluationConfig",
    "FieldsConfig",
    "InferenceConfig",
    "JournalConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "RecipeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScoringConfig",
    "TrainerConfig",
    "WatchdogConfig",
    "WeightSyncConfig",
    "endpoint_url",
]
