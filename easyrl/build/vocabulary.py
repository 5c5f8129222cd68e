"""The policy's token ids, and whether the tokenizer's are among them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from easyrl.build.tokenizer import read_tokenizer
from easyrl.completion_check import Vocabulary
from easyrl.config import Config, ConfigError
from easyrl.models.supported import end_ids_of, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def policy_vocabulary(config: Config, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Token ids of the policy, and all of them by which a server may end a response.

    vLLM heeds its tokenizer's and generation_config.json's, the embedded server config.json's too.
    Raises ``ConfigError``.
    """
    model, tokenizers = config.model, [tokenizer]
    if model.tokenizer_path != model.path:
        with contextlib.suppress(ConfigError):  # servers read the model's own, if it has one
            tokenizers.append(read_tokenizer(model.path))
    of_tokenizers = {each.eos_token_id for each in tokenizers} - {None}
    return Vocabulary(vocabulary_size(model), end_ids_of(model) | of_tokenizers)


def require_known_tokens(config: Config, texts: Sequence[np.ndarray], vocab_size: int) -> None:
    """Raises ``ConfigError`` if the tokenizer gives ids that the model has no embedding of.

    ``texts``: token ids int32 [P] of each.
    """
    largest = max((int(token_ids.max()) for token_ids in texts), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"model.tokenizer: {config.model.tokenizer_path} gives token id {largest}, but "
            f"model.path {config.model.path} has an embedding of {vocab_size} ids; use the "
            "tokenizer that belongs to the model"
        )
