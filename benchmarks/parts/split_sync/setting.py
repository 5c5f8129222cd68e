"""The model whose weights are sent."""

from __future__ import annotations

from pathlib import Path

from benchmarks.parts.random_model import write_random_model
from easyrl.config import Config
from easyrl.config.file import validate_config

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 8, 512, 16_384


def write_model(folder: Path) -> Path:
    """About 45 million parameters in fp32, its embedding tied."""
    return write_random_model(
        folder / "model", hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE
    )


def configuration(folder: Path) -> Config:
    """Of a run with this model."""
    return validate_config(
        {
            "model": {"path": str(folder / "model"), "dtype": "fp32"},
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"kl_coef": 0.0},
            "trainer": {"zero_stage": 1},
        }
    )
