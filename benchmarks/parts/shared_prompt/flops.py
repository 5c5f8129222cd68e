"""Floating-point operations of a forward and backward pass, counted.

Counted are matrix products and attention, two operations per multiply-add; not the embedding,
norms, rotations, activations and the softmax. Backward, a linear layer costs two products of the
forward's size, attention 2.5 times its forward (five products for two: fused attention computes the
scores again). The chunked projection costs three products, or four where the backward pass computes
its logits again.

Shape legend: T tokens that go through the layers, N trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Qwen3Config


@dataclass(frozen=True)
class Work:
    """What a side has to compute."""

    tokens: int  # T
    pairs: int  # of a query and a key that it sees, of all sequences
    trained: int  # N


@dataclass(frozen=True)
class Counting:
    """How often something is computed, in units of its forward."""

    layers: float = 3.0  # linear layers, forward and backward
    attention: float = 3.5
    head: float = 3.0


# without what is computed a second time: the convention of model FLOP utilisation
MODEL = Counting(attention=3.0)


def counting(*, same_pass: bool, checkpointed: bool) -> Counting:
    """As executed; ``checkpointed`` layers run forward twice."""
    again = 1.0 if checkpointed else 0.0
    return Counting(3.0 + again, 3.5 + again, 3.0 if same_pass else 4.0)


def flops(work: Work, config: Qwen3Config, count: Counting) -> float:
    """Operations of ``work`` on a model of the shape ``config``."""
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * query + 2 * key + 3 * config.intermediate_size)
    layer = count.layers * 2 * weights * work.tokens + count.attention * 4 * query * work.pairs
    head = count.head * 2 * config.hidden_size * config.vocab_size * work.trained
    return config.num_hidden_layers * layer + head


def unshared(lengths: list[int], trained: int) -> Work:
    """Each sequence by itself, causal."""
    return Work(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), trained)
