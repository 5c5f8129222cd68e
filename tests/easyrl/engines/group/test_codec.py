"""What crosses a group's channel is what was sent, to the bit, and nothing else crosses it."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from easyrl.engines.base import LogprobComparison, MetricSums, ResponseDifference, StateFile
from easyrl.engines.group.codec import RECORDS, decode, encode
from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey, Segment


def row(**changed):
    values = {
        "input_ids": torch.tensor([5, 6, 7, 8]),
        "position_ids": torch.tensor([0, 1, 2, 2]),
        "segments": (Segment(0, 2, -1), Segment(2, 1, 0), Segment(3, 1, 0)),
        "predictor_index": torch.tensor([1, 1]),
        "label_ids": torch.tensor([7, 8]),
        "advantages": torch.tensor([0.5, -0.5]),
        "inference_logprobs": torch.tensor([-1.0, math.nan]),
        "loss_weights": torch.ones(2),
        "sequence_index": torch.tensor([0, 1]),
        "sequences": (SampleKey(0, 3, 0), SampleKey(0, 3, 1)),
        "endpoints": ("http://a", ""),
    }
    return MicroBatch(**values | changed)


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        raw = [each.contiguous().view(-1).view(torch.uint8) for each in (mine, theirs)]
        assert torch.equal(*raw)
    elif type(mine).__name__ in RECORDS and not isinstance(mine, tuple):
        for each in fields(mine):
            assert_same(getattr(mine, each.name), getattr(theirs, each.name))
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            assert_same(*pair)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        assert_same(list(mine.values()), list(theirs.values()))
    elif isinstance(mine, float) and math.isnan(mine):
        assert math.isnan(theirs)
    else:
        assert mine == theirs


@pytest.mark.parametrize(
    "value",
    [
        None,
        ("optimizer_step", (3.5, 0.0)),
        [1, -2.5e-300, True, "ü", None, math.inf, math.nan],
        {"clip": 0.2, "kind": "a dict may say so"},
        row(),
        [row(), row(frozen=FrozenLogprobs(torch.ones(2), None), is_dummy=True)],
        torch.empty(0),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T,  # not contiguous
        torch.ones(3, dtype=torch.bfloat16),
        ([MetricSums({"loss": 1.5}, {"max": math.nan}, {"u": LogprobComparison(num=2.0)})], None),
        MetricSums(responses=[ResponseDifference(SampleKey(1, 2, 3), 2.0, -0.5, (-0.75, 0.25))]),
        [StateFile("a.safetensors", 2**40, "0" * 64)],
    ],
)
def test_what_is_decoded_is_what_was_encoded(value):
    assert_same(value, decode(encode(value)))


@pytest.mark.parametrize("value", [np.ones(2), object(), {1: 2}, lambda: 0, b"bytes"])
def test_what_is_none_of_the_records_is_refused(value):
    with pytest.raises(AssertionError):
        encode(("call", [value]))


def test_it_is_no_pickle():
    assert b"pickle" not in encode(row()) and encode(row())[:1] != b"\x80"
