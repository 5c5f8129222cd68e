"""The tokenizer, the vocabulary and the prompts, loaded, and the order of the prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from easyrl.build.inference import Scoring
from easyrl.build.run import OpenRun
from easyrl.build.steps import num_epochs
from easyrl.build.trial import try_user_code
from easyrl.config import Config, ConfigError, DatasetConfig
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.models.supported import vocabulary_size
from easyrl.runtime.collectives import on_rank_zero
from easyrl.runtime.user_code import describe
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# transformers makes an empty tokenizer of a folder without any
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class TrainingData:
    """What the run is about."""

    vocab_size: int  # of the policy
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]  # of the evaluation; empty without one
    order: PromptOrder


def read_data(run: OpenRun, scoring: Scoring) -> TrainingData:
    """Reads the prompts and tries rewards and recipe on the first one. Collective.

    Raises ``ConfigError`` for what cannot be used.
    """
    config, evaluation = run.config, run.config.evaluation
    tokenizer, vocab_size = load_tokenizer(config), policy_vocabulary(config)
    prompts = load_data(config.data, tokenizer, "data")
    held_out = load_data(evaluation.data, tokenizer, "evaluation.data") if evaluation else []
    require_known_tokens(config, [*prompts, *held_out], vocab_size)
    on_rank_zero(run.collectives, lambda: try_user_code(config, prompts[0], scoring))
    epochs = num_epochs(config)
    order = PromptOrder(prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=epochs)
    if epochs is None and run.ranks.is_first and config.data.epochs > 1:
        logger.warning(
            "data.epochs=%d is not used: trainer.max_steps ends the run", config.data.epochs
        )
    return TrainingData(vocab_size, prompts, held_out, order)


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
