"""Model and tokenizer of the embedded engine, read from a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from easyrl.runtime.numerics import own_memory

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}


def load_model(path: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model in ``path``, for inference only.

    Raises ``ValueError`` if there is none, or its attention is not plain causal.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: not a model directory, config.json is missing")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, is {dtype!r}")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    config = model.config.get_text_config()
    kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"{path}: only full causal attention is served, the model has {kinds}")
    model.requires_grad_(False).eval()
    own_memory(model)
    return model.to(torch.device(device))  # type: ignore[arg-type]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def context_length(model: PreTrainedModel, wanted: int | None) -> int:
    limit = int(model.config.get_text_config().max_position_embeddings)
    if wanted is None:
        return limit
    if not 1 < wanted <= limit:
        raise ValueError(f"max_model_len: must be from 2 to the model's {limit}, is {wanted}")
    return wanted


def eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Of tokenizer, config and generation config; the first is the primary one, as in vLLM."""
    found: list[int] = []
    for source in (tokenizer, model.config.get_text_config(), model.generation_config):
        ids = None if source is None else source.eos_token_id
        found += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return tuple(dict.fromkeys(found))
