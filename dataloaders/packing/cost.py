"""What a packed row costs to train, relative to other rows of the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RowCost:
    """Multiplications and additions of a forward pass; the backward pass takes twice as many.

    A row costs ``per_token`` for each token in it, ``per_pair`` for each pair of a token and one
    that it attends to, and ``per_label`` for each trained token.
    """

    per_token: float  # all linear layers but the output projection
    per_pair: float
    per_label: float  # output projection

    def tokens(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Of a sequence's tokens ``[begin, end)``; a token attends to those up to itself.

        What comes before ``begin`` is in the row already, and costs nothing more.
        """
        pairs = (end * (end + 1) - begin * (begin + 1)) / 2
        return self.per_token * (end - begin) + self.per_pair * pairs

    def of_group(self, prompt: int, responses: Sequence[int]) -> int:
        """Of a row with a prompt of so many tokens and its responses, all trained: as many tokens
        as cost the same where each attends to itself alone."""
        ends = np.array([prompt, *(prompt + length for length in responses)], dtype=np.float64)
        begins = np.array([0, *(prompt for _ in responses)], dtype=np.float64)
        cost = self.tokens(begins, ends).sum() + self.per_label * sum(responses)
        return round(float(cost) / (self.per_token + self.per_pair))


# Other names of the sizes, of GPT-2, GPT-J, OPT, MPT and the like.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}


def model_cost(shape: Mapping[str, Any]) -> RowCost:
    """Of a decoder whose sizes have the names that Hugging Face configurations give them.

    Experts count as far as a token goes through them. Raises ``KeyError`` for a missing size.
    """
    shape = with_usual_names(shape)
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"]
    head_size = shape.get("head_dim") or hidden // heads
    query_size = heads * head_size
    key_size = (shape.get("num_key_value_heads") or heads) * head_size
    inner = shape["intermediate_size"]
    if shape.get("num_experts_per_tok"):
        inner = shape["num_experts_per_tok"] * shape.get("moe_intermediate_size", inner)
    # query and output; key and value; gate, up and down
    weights = 2 * hidden * query_size + 2 * hidden * key_size + 3 * hidden * inner
    return RowCost(
        per_token=2.0 * layers * weights,
        per_pair=4.0 * layers * query_size,  # scores, and their sum of values
        per_label=2.0 * hidden * shape["vocab_size"],
    )


def with_usual_names(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """``shape`` with its sizes under the names that most configurations have for them."""
    usual = {}
    for name, others in _OTHER_NAMES.items():
        if size := next((shape[n] for n in (name, *others) if shape.get(n)), None):
            usual[name] = size
    if "intermediate_size" not in usual and "hidden_size" in usual:
        # Where it is not said it is this: the habit since Vaswani et al. 2017.
        usual["intermediate_size"] = 4 * usual["hidden_size"]
    return {**shape, **usual}


# Of a dense model of 4B parameters (Qwen3-4B).
DEFAULT_COST = RowCost(per_token=7_266_631_680.0, per_pair=589_824.0, per_label=777_912_320.0)


def cost_of_model_at(path: Path) -> RowCost:
    """Of the model in a folder, from its ``config.json``; ``DEFAULT_COST`` if that does not say."""
    try:
        return model_cost(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # missing, null, a list
        return DEFAULT_COST
