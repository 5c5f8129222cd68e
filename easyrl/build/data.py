"""The tokenizer, the vocabulary and the prompts, loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easyrl.config import Config, ConfigError, DatasetConfig
from easyrl.dataloaders.prompts.dataset import load_prompts
from easyrl.models.vocabulary import vocabulary_size
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy, from disk."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.tokenizer_path, local_files_only=True)


def policy_vocabulary(config: Config) -> int:
    """Token ids of the policy run from 0 to one less. Raises ``ConfigError``."""
    try:
        return vocabulary_size(config.model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_data(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> Sequence[Prompt]:
    """The prompts of one section. Raises ``ConfigError`` naming file, line and remedy."""
    try:
        return load_prompts(config, tokenizer, source_key=key)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
