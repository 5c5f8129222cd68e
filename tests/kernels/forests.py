"""Rows to try attention backends on: forests of segments, and random queries, keys and values."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from easyrl.kernels.attention.segment_layout import SegmentLayout

Triples = list[tuple[int, int, int]]

FORESTS: dict[str, Triples] = {
    "one token": [(0, 1, -1)],
    "one segment": [(0, 9, -1)],
    "ragged group": [(0, 5, -1), (5, 3, 0), (8, 1, 0), (9, 4, 0)],
    "two groups": [(0, 2, -1), (2, 3, 0), (5, 4, -1), (9, 2, 2), (11, 1, 2)],
    "depth three": [(0, 3, -1), (3, 2, 0), (5, 2, 1), (7, 1, 2), (8, 2, 1), (10, 3, 0)],
}


def random_forest(seed: int, num_segments: int, longest: int) -> Triples:
    """Depth first: a segment hangs below its predecessor, or below one of its ancestors."""
    draw = random.Random(seed)
    segments: Triples = []
    branch = [-1]  # a root's parent, then the last segment's ancestors and itself
    start = 0
    for index in range(num_segments):
        branch = branch[: draw.randint(1, len(branch))]
        length = draw.randint(1, longest)
        segments.append((start, length, branch[-1]))
        branch.append(index)
        start += length
    return segments


ALL_FORESTS = FORESTS | {
    f"random {seed}": random_forest(seed, num_segments=15, longest=6) for seed in range(4)
}


def random_inputs(
    layout: SegmentLayout,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[Tensor]:
    """Query, key and value as a model makes them: [1, tokens, heads, size], transposed."""
    generator = torch.Generator().manual_seed(layout.num_tokens)
    shapes = [(1, layout.num_tokens, number, head_size) for number in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .transpose(1, 2)
        .requires_grad_()
        for shape in shapes
    ]


def output_and_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """``output`` and the gradients of a fixed random weighting of it, all in float64."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return [tensor.detach().double() for tensor in (output, *gradients)]
