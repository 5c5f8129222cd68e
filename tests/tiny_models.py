"""Random models of the supported families, small enough for a test, and random groups for them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from easyrl.schema import Completion, Prompt, RolloutGroup, Score, VersionSpan

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
VOCAB_SIZE = 67
CLASSES: dict[Family, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def tiny_config(family: Family, *, tied: bool = False, **overrides: object) -> PreTrainedConfig:
    """Two layers, four query heads over two key and value heads; ``overrides`` replace settings."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # not hidden_size / heads, as in real Qwen3
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if family in ("llama", "qwen2"):
        settings["head_dim"] = 8
    if family == "mistral":
        settings["sliding_window"] = None  # unlike its configuration's default
    if family == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        settings |= {"norm_topk_prob": True, "mlp_only_layers": [0]}
    return CLASSES[family][0](**(settings | overrides))


def tiny_model(
    family: Family, *, tied: bool = False, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """An fp32 model whose weights are large enough for every token to depend on the others."""
    torch.manual_seed(seed)
    model = CLASSES[family][1](tiny_config(family, tied=tied, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(
                parameter,
                mean=1.0 if parameter.ndim == 1 else 0.0,
                std=parameter.shape[-1] ** -0.5,
            )
    return model.eval()


def save_tiny_model(
    directory: Path, family: Family, *, tied: bool = False, seed: int = 0, **overrides: object
) -> Path:
    """Writes ``tiny_model(…)`` as ``from_pretrained`` reads it and returns ``directory``."""
    tiny_model(family, tied=tied, seed=seed, **overrides).save_pretrained(directory)
    return directory


def random_completion(
    rng: np.random.Generator, length: int, *, truncated: bool = False, masked: float = 0.0
) -> Completion:
    """``length`` random tokens, each left out of the loss with probability ``masked``."""
    return Completion(
        token_ids=rng.integers(1, VOCAB_SIZE, length, dtype=np.int32),
        logprobs=-rng.random(length, dtype=np.float32),
        finish_reason="length" if truncated else "stop",
        version_spans=(VersionSpan("run:0:0", 0, length),),
        endpoint="http://127.0.0.1:1",
        loss_mask=rng.random(length) >= masked,
    )


def random_group(
    rng: np.random.Generator,
    prompt_length: int,
    response_lengths: list[int],
    *,
    index: int = 0,
    masked: float = 0.0,
    truncated: tuple[int, ...] = (),
) -> RolloutGroup:
    """A group with random tokens; the responses at positions ``truncated`` are cut short."""
    prompt_ids = rng.integers(1, VOCAB_SIZE, prompt_length, dtype=np.int32)
    return RolloutGroup(
        prompt=Prompt(index=index, token_ids=prompt_ids, text="", answer=None),
        completions=tuple(
            random_completion(rng, length, truncated=i in truncated, masked=masked)
            for i, length in enumerate(response_lengths)
        ),
        scores=tuple(Score(float(rng.random()), {}) for _ in response_lengths),
        policy_version="run:0:0",
        dispatched_s=0.0,
        completed_s=1.0,
    )
