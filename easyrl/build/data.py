"""The tokenizer, the vocabulary and the prompts, loaded, and the order of the prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from easyrl.build.inference import Scoring
from easyrl.build.run import OpenRun
from easyrl.build.same_vocabulary import check_vocabularies
from easyrl.build.steps import num_epochs
from easyrl.build.tokenizer import check_chat_template, load_tokenizer, read_tokenizer
from easyrl.build.trial import try_user_code
from easyrl.build.vocabulary import policy_vocabulary, require_known_tokens
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError, DatasetConfig, set_key
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.dataloaders.prompts.template_values import every_variant
from easyrl.environments.mixing import check_named
from easyrl.rewards.functions import check_prompts
from easyrl.runtime.collectives import on_rank_zero
from easyrl.schema import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """What the run is about."""

    vocabulary: Vocabulary  # of the policy
    prompts: Sequence[Prompt]
    held_out: Mapping[str, Sequence[Prompt]]  # of each set of the evaluation; empty without one
    order: PromptOrder


def read_data(run: OpenRun, scoring: Scoring) -> TrainingData:
    """Reads the prompts and tries rewards and recipe on the first one. Collective.

    Raises ``ConfigError`` for what cannot be used.
    """
    config = run.config
    tokenizer = load_tokenizer(config)
    check_chat_template(config, tokenizer)
    vocabulary = policy_vocabulary(config, tokenizer)
    check_vocabularies(config, tokenizer, read_tokenizer)
    seed = config.run.seed
    prompts = load_trained(config, tokenizer)
    held_out = load_held_out(config, tokenizer)
    possible = [each for given in (prompts, *held_out.values()) for each in every_variant(given)]
    require_known_tokens(config, [prompt.token_ids for prompt in possible], vocabulary.size)
    if config.scoring.on_reward_error != "zero":
        on_rank_zero(run.collectives, lambda: check_prompts(config.rewards, possible))
    on_rank_zero(run.collectives, lambda: try_user_code(config, prompts[0], scoring))
    epochs = num_epochs(config)
    order = PromptOrder(prompts, seed=seed, shuffle=config.data.shuffle, epochs=epochs)
    if epochs is None and run.ranks.is_first and config.data.epochs > 1:
        logger.warning(
            "data.epochs=%d is not used: trainer.max_steps ends the run", config.data.epochs
        )
    return TrainingData(vocabulary, prompts, held_out, order)


def load_trained(config: Config, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
    """The prompts of ``data``. Raises ``ConfigError`` naming file, line and remedy."""
    return _load(config, config.data, tokenizer, "data")


def load_held_out(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, Sequence[Prompt]]:
    """The prompts of each set of the evaluation; empty without one. Raises as ``load_trained``."""
    sets = config.evaluation.sets if config.evaluation else {}
    return {
        name: _load(config, each.data, tokenizer, f"{set_key(name)}.data", is_held_out=True)
        for name, each in sets.items()
    }


def _load(
    config: Config,
    section: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    *,
    is_held_out: bool = False,
) -> Sequence[Prompt]:
    seed = config.run.seed
    try:
        prompts = load_prompts(
            section, tokenizer, source_key=key, seed=seed, is_held_out=is_held_out
        )
    except ValueError as error:
        said = str(error)
        raise ConfigError(said if said.startswith(key) else f"{key}: {said}") from error
    check_named(config.environments, prompts)
    return prompts
