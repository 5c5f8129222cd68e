"""The layouts that are compared, and the batch that they are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from easyrl.build.recipe import group_functions
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.engines.megatron.layout import Layout
from easyrl.schema import Completion, Prompt, RolloutGroup, Score, VersionSpan
from easyrl.trainer.accumulation import GroupFunctions

VOCAB_SIZE = 101  # of no number of ranks a multiple: padded
PADDING_ID = 7  # in prompts and responses too: its embedding has no gradient but as a label's
NUM_LAYERS = 4
NUM_UPDATES = 2
GROUPS_PER_UPDATE = 8
NUM_GENERATIONS = 3
KL_COEF, CLIP, MAX_GRAD_NORM, TEMPERATURE = 0.1, 0.2, 0.5, 0.8
ROW_TOKENS = 96  # several ragged groups
ADAM = {"learning_rate": 1e-3, "adam_eps": 1e-3}
# With an eps far above every gradient AdamW's first step is ``-lr / eps`` times the gradient.
SGD_SCALE = 1000.0
SGD = {"learning_rate": 1e9 * SGD_SCALE, "adam_eps": 1e9}


@dataclass(frozen=True)
class Case:
    """A layout with all that changes its numbers."""

    name: str
    layout: Layout
    zero_stage: int = 1
    dtype: str = "fp32"
    tied: bool = True


def cases() -> list[Case]:
    """All that are compared."""
    layouts = {
        "tp2": (Layout(tensor=2), 1),
        "tp2sp": (Layout(tensor=2, sequence_parallel=True), 1),
        "tp4": (Layout(tensor=4), 1),  # more ranks than key-value heads
        "pp2": (Layout(pipeline=2), 1),
        "pp2-flush": (Layout(pipeline=2, schedule="flush"), 1),
        "pp2-interleaved": (Layout(pipeline=2, chunks=2), 1),
        "pp4": (Layout(pipeline=4), 1),
        "pp-uneven": (Layout(pipeline=2, layers_per_stage=(1, 3)), 1),
        "tp2pp2": (Layout(tensor=2, pipeline=2), 1),
        "tp2dp2-zero1": (Layout(tensor=2, data=2), 1),
        "tp2dp2-zero2": (Layout(tensor=2, data=2), 2),
        "tp2dp2-zero3": (Layout(tensor=2, data=2), 3),
        "pp2dp2-zero1": (Layout(pipeline=2, data=2), 1),
        "dp4": (Layout(data=4), 2),
    }
    in_fp32 = [
        Case(name, layout, stage, tied=tied)
        for name, (layout, stage) in layouts.items()
        for tied in (True, False)
    ]
    in_bf16 = [
        Case(name, *layouts[name], dtype="bf16") for name in ("pp2", "tp2pp2", "tp2dp2-zero1")
    ]
    return in_fp32 + in_bf16


def model_folder(folder: Path, name: str, tied: bool) -> Path:
    return folder / f"{name}-{'tied' if tied else 'untied'}"


def write_models(folder: Path) -> None:
    """Policy and reference, tied and not: random Qwen3 models in which every token counts."""
    for tied in (True, False):
        for seed, name in enumerate(("policy", "reference")):
            torch.manual_seed(seed)
            config = Qwen3Config(
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=NUM_LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=512,
                tie_word_embeddings=tied,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=PADDING_ID,
            )
            model = Qwen3ForCausalLM(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    mean = 1.0 if parameter.ndim == 1 else 0.0
                    nn.init.normal_(parameter, mean=mean, std=0.6 * parameter.shape[-1] ** -0.5)
            model.save_pretrained(model_folder(folder, name, tied))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')


def configuration(folder: Path, case: Case, trainer: dict[str, Any]) -> Config:
    """Of a run with the case's model; ``trainer``: its optimizer's settings."""
    return validate_config(
        {
            "model": {
                "path": str(model_folder(folder, "policy", case.tied)),
                "dtype": case.dtype,
            },
            "data": {"files": [str(folder / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "rollout": {
                "temperature": TEMPERATURE,
                "max_tokens": 16,
                "num_generations": NUM_GENERATIONS,
            },
            "recipe": {
                "aggregation": "token",
                "kl_coef": KL_COEF,
                "clip_eps_low": CLIP,
                "clip_eps_high": CLIP,
            },
            "trainer": {
                "batch_size": NUM_UPDATES * GROUPS_PER_UPDATE,
                "updates_per_batch": NUM_UPDATES,
                "zero_stage": case.zero_stage,
                "max_grad_norm": MAX_GRAD_NORM,
                "max_tokens_per_micro_batch": ROW_TOKENS,
            }
            | trainer,
        }
    )


def functions(folder: Path, case: Case) -> GroupFunctions:
    """The recipe's, as a run has them."""
    return group_functions(configuration(folder, case, ADAM))


def updates() -> list[list[RolloutGroup]]:
    """The groups of each update, in prompt order, with random rewards and lengths."""
    rng = np.random.default_rng(3)
    groups = [_group(rng, index) for index in range(NUM_UPDATES * GROUPS_PER_UPDATE)]
    return [groups[i : i + GROUPS_PER_UPDATE] for i in range(0, len(groups), GROUPS_PER_UPDATE)]


def _group(rng: np.random.Generator, index: int) -> RolloutGroup:
    def completion(length: int) -> Completion:
        return Completion(
            token_ids=rng.integers(1, VOCAB_SIZE, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan("run:0:0", 0, length),),
            endpoint="http://127.0.0.1:1",
            loss_mask=rng.random(length) >= 0.1,
        )

    prompt = rng.integers(1, VOCAB_SIZE, int(rng.integers(2, 15)), dtype=np.int32)
    lengths = rng.integers(2, 13, NUM_GENERATIONS).tolist()
    return RolloutGroup(
        prompt=Prompt(index=index, token_ids=prompt, text="", answer=None),
        completions=tuple(completion(length) for length in lengths),
        scores=tuple(Score(float(rng.random()), {}) for _ in lengths),
        policy_version="run:0:0",
        dispatched_s=0.0,
        completed_s=1.0,
    )
