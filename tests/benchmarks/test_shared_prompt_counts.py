"""Operations against what PyTorch counts and what a mask shows; rows against hand arithmetic."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.parts.shared_prompt.flops import MODEL, Counting, Work, counting, flops, unshared
from benchmarks.parts.shared_prompt.report import make_row, speed_up, table
from benchmarks.parts.shared_prompt.sizes import SHAPES, Shape, model_config, random_batch
from easyrl.kernels.attention.segment_layout import SegmentLayout
from tests.tiny_models import tiny_config, tiny_model

TOKENS = 24


def test_operations_are_those_that_pytorch_counts() -> None:
    # eager attention multiplies all pairs, twice forward and four times backward
    model = tiny_model("qwen3", attn_implementation="eager")
    work = Work(tokens=TOKENS, pairs=TOKENS * TOKENS, trained=TOKENS)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=torch.arange(TOKENS)[None]).logits.logsumexp(-1).sum()
        forward = counter.get_total_flops()
        loss.backward()
    config = tiny_config("qwen3")
    assert forward == flops(work, config, Counting(1, 1, 1))
    assert counter.get_total_flops() == flops(work, config, MODEL)


def test_pairs_are_those_of_the_masks() -> None:
    batch = random_batch(Shape(7, 3, 10), 67, ragged=True)
    layout = SegmentLayout(batch.micro_batch.segments)
    assert layout.num_pairs == int(layout.dense_mask(torch.device("cpu")).sum())
    work = unshared(batch.lengths, 5)
    masks = [torch.ones(length, length).tril() for length in batch.lengths]
    assert work == Work(sum(batch.lengths), int(sum(mask.sum() for mask in masks)), 5)


def test_counting_of_what_runs_twice() -> None:
    assert counting(same_pass=True, checkpointed=False) == Counting(3.0, 3.5, 3.0)
    assert counting(same_pass=False, checkpointed=True) == Counting(4.0, 4.5, 4.0)


def row_of(shape: Shape, seconds: dict[str, list[float]]) -> dict[str, float]:
    config = model_config("tiny")
    layout = SegmentLayout(random_batch(shape, config.vocab_size).micro_batch.segments)
    trained = shape.G * shape.R
    shared = Work(layout.num_tokens, layout.num_pairs, trained)
    separate = unshared([shape.P + shape.R] * shape.G, trained)
    count = counting(same_pass=True, checkpointed=False)
    return make_row(shape, shared, separate, config, count, seconds, {"ours": (0.0, 1e-6)}, 1e11)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ideal_is_below_the_ratio_of_tokens(shape: Shape) -> None:
    # the projection is the same on both sides; long sequences' attention can add to the ratio
    row = row_of(shape, {"ours": [1.0], "packed": [1.0]})
    tokens = shape.G * (shape.P + shape.R) / (shape.P + shape.G * shape.R)
    assert 1.0 < row["flop_ideal"] < 1.25 * tokens


def test_a_row_has_medians_of_ratios_and_what_is_missing_is_null() -> None:
    row = row_of(Shape(64, 2, 8), {"ours": [1.0, 2.0, 1.0], "packed": [2.0, 2.0, 3.0]})
    assert row["vs_packed"] == 2.0
    assert row["ratio_of_ideal"] == pytest.approx(2.0 / row["flop_ideal"], rel=1e-3)
    assert row["vs_trl"] is None and row["vs_padded"] is None
    assert row["mfu"] == pytest.approx(row["tflops"] * 1e12 / 1e11, rel=1e-3)
    keys = {"P", "G", "R", "flop_ideal", "vs_padded", "vs_packed", "vs_prefix_grouper", "vs_trl"}
    assert keys <= set(json.loads(json.dumps(row)))
    assert len(table([row]).splitlines()) == 2
    assert speed_up([], [1.0]) is None
