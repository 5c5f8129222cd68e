"""Random sequence classifiers of a test's size, as ``from_pretrained`` reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.tiny_models import Family, tiny_config
from tests.tiny_tokenizer import tiny_tokenizer

VOCAB_SIZE = 257  # of ``tiny_tokenizer``: a token per byte, and one that ends


def save_tiny_classifier(
    directory: Path,
    family: Family = "qwen3",
    *,
    num_labels: int = 1,
    tokenizer: bool = True,
    **overrides: object,
) -> PreTrainedModel:
    """Writes a classifier whose logits depend on every token, and returns it."""
    config = tiny_config(family, vocab_size=VOCAB_SIZE, **overrides)
    config.num_labels = num_labels
    return save_classifier(directory, config, tokenizer=tokenizer)


def save_classifier(
    directory: Path, config: PretrainedConfig, *, tokenizer: bool = True
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    # as transformers reads it back, with nothing of ours in between
    assert AutoConfig.from_pretrained(directory).num_labels == config.num_labels
    return model
