"""A teacher from disk: what its folder has to hold, and its model."""

from __future__ import annotations

from pathlib import Path

from easyrl.config import ModelConfig
from easyrl.models.loading import load_policy_model, path_errors_named
from easyrl.models.policy_model import PolicyModel
from easyrl.models.supported import read_model_config, vocabulary_size

KEY = "recipe.teacher"


def teacher_config(policy: ModelConfig, path: Path) -> ModelConfig:
    """The settings of the teacher at ``path``: the policy's, without what only training needs."""
    own = {"path": path, "tokenizer": None, "lora": None}
    return policy.model_copy(
        update=own | {"activation_checkpointing": "none", "checkpoint_every": 1}
    )


def load_teacher(policy: ModelConfig, path: Path) -> PolicyModel:
    """The model at ``path``. Raises ``ConfigError`` naming ``recipe.teacher``."""
    with path_errors_named(KEY):
        return load_policy_model(teacher_config(policy, path))


def vocabulary_size_at(policy: ModelConfig, path: Path, key: str) -> int:
    """Rows of the embedding of the model at ``path``; reads no weight.

    Raises ``ConfigError`` naming ``key`` if ``path`` holds no model, or one that cannot run on
    packed rows.
    """
    model = teacher_config(policy, path)
    with path_errors_named(key):
        read_model_config(model)
        return vocabulary_size(model)
