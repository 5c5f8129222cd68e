"""A random Qwen3 and random prompts for measuring; nothing here has learnt anything."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from easyrl.demo.build_model import build_tokenizer


def write_random_model(
    directory: Path,
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int | None = None,
    seed: int = 0,
    weight_std: float = 0.02,
) -> Path:
    """A folder that ``from_pretrained`` loads, with the demo's tokenizer.

    With a ``weight_std`` of 0.02 all tokens are about as probable; from about 0.2 on what comes
    next depends on what was before.
    """
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(2, hidden_size // 32),
        num_key_value_heads=max(1, hidden_size // 64),
        head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        initializer_range=weight_std,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_prompts(path: Path, count: int, num_tokens: int, seed: int = 0) -> Path:
    """``count`` prompts of ``num_tokens`` random digits, one token each."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            digits = "".join(rng.choice("0123456789") for _ in range(num_tokens))
            file.write(json.dumps({"prompt": digits, "answer": rng.choice("0123456789")}) + "\n")
    return path
