"""Models that are split over two processes, whose memory is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easyrl.config import Config
from tests.easyrl.memory_plan.memory_cases import config

NUM_ROWS = 4  # of a schedule; more than there are stages
BF16 = {"dtype": "bf16"}
LAYER, SELECTIVE = {"activation_checkpointing": "layer"}, {"activation_checkpointing": "selective"}
# by name: the folder of the model, section ``parallel``, and what else is not the default here
SPLIT_CASES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "tensor": ("tied", {"tensor": 2}, {}),
    "tensor-selective": ("untied", {"tensor": 2}, {"model": BF16 | SELECTIVE}),
    "sequence": ("untied", {"tensor": 2, "sequence": True}, {}),
    "pipeline": ("tied", {"pipeline": 2}, {}),
    "pipeline-layer": ("tied", {"pipeline": 2}, {"model": BF16 | LAYER}),
    "interleaved": ("untied", {"pipeline": 2, "chunks_per_stage": 3}, {}),
    "uneven": ("untied", {"pipeline": 2, "layers_per_stage": [2, 4]}, {}),
    "reference": ("untied", {"pipeline": 2}, {"recipe": {"kl_coef": 0.1}}),
}


def split_config(folder: Path, name: str) -> Config:
    model, parallel, more = SPLIT_CASES[name]
    sections = {
        "model": {"dtype": "fp32"} | more.get("model", {}),
        "recipe": more.get("recipe", {}),
        "trainer": {"zero_stage": 1},
        "parallel": parallel,
    }
    return config(folder / model, **sections)
