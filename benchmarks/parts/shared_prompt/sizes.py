"""What ``benchmarks.shared_prompt`` runs: shapes of groups, shapes of models, one random batch.

Shape legend: P prompt tokens, G responses, R tokens of a response, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.parts.made_up_group import made_up_group
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.recipes import GRPO, RunSettings
from easyrl.recipes.groups import trained_group
from easyrl.schema import MicroBatch

RECIPE = GRPO(kl_coef=0.0)  # the clipped loss alone, a mean over sequences


class Shape(NamedTuple):
    """One group: P prompt tokens and G responses of R tokens."""

    P: int
    G: int
    R: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``P,G,R``. Raises ``ValueError`` for anything else."""
        prompt, group, response = (int(number) for number in text.split(","))
        if min(prompt, group, response) < 1:
            raise ValueError(f"{text}: prompt, group and response have at least one each")
        return cls(prompt, group, response)


SHAPES = (
    Shape(512, 8, 64),
    Shape(1024, 8, 128),
    Shape(256, 8, 256),
    Shape(2048, 16, 32),
    Shape(128, 8, 512),
)
LONG_SHAPES = (
    Shape(2048, 16, 512),
    Shape(4096, 16, 512),
    Shape(8192, 16, 512),
    Shape(16384, 8, 1024),
    Shape(1024, 16, 2048),
)

MODELS: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
    "0.6b": {  # the sizes of Qwen3-0.6B
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "4b": {  # the sizes of Qwen3-4B
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}


def model_config(name: str) -> Qwen3Config:
    """A Qwen3 of the sizes in ``MODELS[name]``, positions for the longest sequence."""
    return Qwen3Config(
        **MODELS[name],
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@dataclass(frozen=True)
class Batch:
    """One group of random tokens, as every side gets it."""

    prompt_ids: Tensor  # int64 [P]
    responses: tuple[Tensor, ...]  # G of int64 [R_g], every token trained
    advantages: Tensor  # float32 [G]
    micro_batch: MicroBatch  # the same group as our row; its N tokens are those of the responses
    denominator: float  # divides the loss sum (GRPO: the number of responses)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and response."""
        return [len(self.prompt_ids) + len(response) for response in self.responses]

    def predictor_index(self, starts: Sequence[int]) -> Tensor:
        """int64 [N]: what predicts each trained token where sequence g begins at ``starts[g]``."""
        prompt = len(self.prompt_ids)
        return torch.cat(
            [
                torch.arange(start + prompt - 1, start + prompt - 1 + len(response))
                for start, response in zip(starts, self.responses, strict=True)
            ]
        )


def random_batch(shape: Shape, vocab_size: int, *, ragged: bool = False, seed: int = 0) -> Batch:
    """``ragged``: responses of R/2 to R tokens instead of R, the longest of exactly R."""
    rng = np.random.default_rng(seed)
    lengths = np.full(shape.G, shape.R)
    if ragged:
        lengths[1:] = rng.integers(max(1, shape.R // 2), shape.R + 1, shape.G - 1)
    prompt = rng.integers(0, vocab_size, shape.P, dtype=np.int32)
    responses = [rng.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]
    advantages = rng.normal(0.5, 1.0, shape.G).astype(np.float32)
    group = made_up_group(0, prompt, responses)
    run = RunSettings(shape.R, shape.G, temperature=1.0, seed=0)
    (micro_batch,) = pack_groups(
        [trained_group(RECIPE, group, advantages, run)],
        max_tokens_per_micro_batch=shape.P + shape.G * shape.R,
    )
    return Batch(
        prompt_ids=torch.from_numpy(prompt.astype(np.int64)),
        responses=tuple(torch.from_numpy(tokens.astype(np.int64)) for tokens in responses),
        advantages=torch.from_numpy(advantages),
        micro_batch=micro_batch,
        denominator=RECIPE.denominator([group], run),
    )
