"""The models of the contract: tiny Qwen3 whose tokens are letters, and the truth about them.

The truth is the forward pass of ``transformers`` in this process, on exactly the tokens at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_models import VOCAB_SIZE, tiny_model

EOS = 0
MAX_MODEL_LEN = 2048
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/"
assert len(LETTERS) == VOCAB_SIZE - 1


def contract_model(tied: bool, seed: int = 0) -> Any:
    """The model with other weights for each ``seed``; fp32, two layers."""
    return tiny_model(
        "qwen3",
        tied=tied,
        seed=seed,
        head_dim=32,  # vLLM's CPU attention knows no smaller one
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=EOS,
        dtype="float32",
    )


def save_contract_model(directory: Path, tied: bool) -> Path:
    """Writes the model of seed 0 and a tokenizer, one letter per token but ``EOS``."""
    model = contract_model(tied)
    # vLLM takes the end of the sequence from here
    model.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=True)
    model.save_pretrained(directory)
    vocabulary = {"<eos>": EOS} | {letter: i for i, letter in enumerate(LETTERS, 1)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.save_pretrained(directory)
    return directory


def text_of(token_ids: Sequence[int]) -> str:
    """Letters of ``token_ids``, which hold no ``EOS``."""
    return "".join(LETTERS[token_id - 1] for token_id in token_ids)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names that ``save_pretrained`` gives them, a tied one once."""
    tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, weight


@torch.no_grad()
def true_logprobs(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """Of the tokens of ``response`` behind ``prompt``, at ``temperature``: float32 [R]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
