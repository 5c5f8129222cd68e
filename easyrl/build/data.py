"""The tokenizer, the vocabulary and the prompts, loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from easyrl.config import Config, ConfigError, DatasetConfig
from easyrl.dataloaders.prompts.dataset import load_prompts
from easyrl.models.supported import vocabulary_size
from easyrl.runtime.user_code import describe
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# transformers makes an empty tokenizer of a folder without any
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy, from disk. Raises ``ConfigError``."""
    from transformers import AutoTokenizer

    folder = config.model.tokenizer_path
    remedy = f"give a folder with a whole one ({', '.join(TOKENIZER_FILES)})"
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        raise ConfigError(f"model.tokenizer: {folder} has no tokenizer; {remedy}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of tokenizers, json, or transformers' conversions
        raise ConfigError(
            f"model.tokenizer: {folder} cannot be read ({describe(error):.150}); {remedy}"
        ) from error


def policy_vocabulary(config: Config) -> int:
    """Token ids of the policy run from 0 to one less. Raises ``ConfigError``."""
    return vocabulary_size(config.model)


def require_known_tokens(config: Config, prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Raises ``ConfigError`` if the tokenizer gives ids that the model has no embedding of."""
    largest = max((int(prompt.token_ids.max()) for prompt in prompts), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"model.tokenizer: {config.model.tokenizer_path} gives token id {largest}, but "
            f"model.path {config.model.path} has an embedding of {vocab_size} ids; use the "
            "tokenizer that belongs to the model"
        )


def load_data(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> Sequence[Prompt]:
    """The prompts of one section. Raises ``ConfigError`` naming file, line and remedy."""
    try:
        return load_prompts(config, tokenizer, source_key=key)
    except ValueError as error:
        said = str(error)
        raise ConfigError(said if said.startswith(key) else f"{key}: {said}") from error
