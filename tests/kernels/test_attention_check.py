"""A backend is compared with the reference at its first use, and only one that agrees is used."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from easyrl.kernels.attention import attention_check
from easyrl.kernels.attention.attention_agreement import Agreement, agreement_with_reference
from easyrl.kernels.attention.attention_check import CheckedAttention, backends_in_order
from easyrl.kernels.attention.merged_attention import merged_attention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import BACKENDS, Backend, reference_attention
from tests.kernels.forests import FORESTS, random_forest, random_inputs

SCALE = 0.3
CPU = torch.device("cpu")
GROUP = SegmentLayout([(0, 200, -1), *((200 + 40 * i, 40, 0) for i in range(3))])
LONG_ROW = SegmentLayout([(0, 4096, -1)])
SHORT = SegmentLayout([(0, 10, -1), *((10 + 20 * i, 20, 0) for i in range(30))])
CANCELLING_OFFSET = 300.0


def wrong_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """The last response sees the one before, too."""
    segments = list(layout.segments)
    (start, length, parent), (_, last, _) = segments[-2:]
    segments[-2:] = [(start, length + last, parent)]
    return reference_attention(query, key, value, SegmentLayout(segments), scale)


class _NoPromptGradient(torch.autograd.Function):
    """Right forward; its backward forgets that responses attend to the first key."""

    @staticmethod
    def forward(ctx, key: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return key.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        grad = grad.clone()
        grad[:, :, 0] = 0
        return grad


def wrong_backward(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    return reference_attention(query, _NoPromptGradient.apply(key), value, layout, scale)


def raising(*_: object) -> Tensor:
    raise ValueError("this kernel does not like Tuesdays")


def not_a_number(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    return reference_attention(query, key, value, layout, scale) * float("nan")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Backend], list[int]]:
    """Puts a function in place of a backend; the list grows by the row's tokens at each call."""

    def put(name: str, function: Backend) -> list[int]:
        calls: list[int] = []

        def counted(query: Tensor, *args: object) -> Tensor:
            calls.append(query.shape[2])
            return function(query, *args)  # type: ignore[arg-type]

        module = types.ModuleType("planted_backend")
        module.attend = counted  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "planted_backend", module)
        monkeypatch.setitem(BACKENDS, name, "planted_backend:attend")
        return calls

    return put


Plant = Callable[[str, Backend], list[int]]


def test_a_good_backend_is_checked_once_and_used(
    plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    calls = plant("merged", merged_attention)
    attention = CheckedAttention()
    inputs = random_inputs(GROUP, dtype=torch.float32)
    with caplog.at_level(logging.INFO, logger=attention_check.__name__):
        first = attention(*inputs, GROUP, SCALE)
        second = attention(*inputs, GROUP, SCALE)
    tokens = GROUP.num_tokens
    assert calls == [tokens, tokens, tokens]  # the check and two uses
    assert torch.equal(first, second)
    assert torch.equal(first, merged_attention(*inputs, GROUP, SCALE))
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "merged on cpu in torch.float32" in record.message
    attention(*random_inputs(GROUP, dtype=torch.bfloat16), GROUP, SCALE)
    attention(*random_inputs(GROUP, dtype=torch.float32, kv_heads=4), GROUP, SCALE)
    assert len(calls) == 7  # another dtype and other heads are checked on their own


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (wrong_forward, "output is off by"),
        (wrong_backward, "gradient of key is off by"),
        (not_a_number, "off by nan"),
        (raising, "failed: this kernel does not like Tuesdays"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_backend_is_refused(
    backend: Backend,
    message: str,
    dtype: torch.dtype,
    plant: Plant,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = plant("merged", backend)
    inputs = random_inputs(GROUP, dtype=dtype)
    attention = CheckedAttention("auto")
    for _ in range(2):
        output = attention(*inputs, GROUP, SCALE)
        assert torch.equal(output, reference_attention(*inputs, GROUP, SCALE))
    assert len(calls) == 1
    (record,) = caplog.records  # once, not at every call
    assert record.levelno == logging.WARNING
    for part in (f"merged on cpu in {dtype}", message, "reference is used instead"):
        assert part in record.message

    with pytest.raises(RuntimeError, match=f"(?s){message}.*Set model.attention to auto"):
        CheckedAttention("merged")(*inputs, GROUP, SCALE)


def test_missing_packages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "merged", "easyrl_has_no_such_package:attend")
    inputs = random_inputs(GROUP)
    output = CheckedAttention()(*inputs, GROUP, SCALE)
    assert torch.equal(output, reference_attention(*inputs, GROUP, SCALE))
    assert "easyrl_has_no_such_package" in caplog.records[0].message
    with pytest.raises(RuntimeError, match="easyrl_has_no_such_package.*model.attention"):
        CheckedAttention("merged")(*inputs, GROUP, SCALE)


def test_out_of_memory_is_not_the_backends_fault(plant: Plant) -> None:
    def hungry(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    plant("merged", hungry)
    with pytest.raises(torch.OutOfMemoryError):
        CheckedAttention()(*random_inputs(GROUP), GROUP, SCALE)


def test_leaves_no_trace() -> None:
    """Random states, gradients, grad mode; under no_grad and inference_mode too."""
    inputs = random_inputs(GROUP, dtype=torch.float32)
    state = torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = CheckedAttention("merged")(*inputs, GROUP, SCALE)
            assert not torch.is_grad_enabled() and not output.requires_grad
    output = CheckedAttention("merged")(*inputs, GROUP, SCALE)
    assert output.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(x.grad is None for x in inputs)


def test_catches_a_wrong_backward_under_no_grad(plant: Plant) -> None:
    plant("merged", wrong_backward)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradient of key"):
        CheckedAttention("merged")(*random_inputs(GROUP), GROUP, SCALE)


_KEPT = {
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("backend", [None, wrong_backward])
def test_first_use_inside_a_checkpoint(
    selective: bool, backend: Backend | None, plant: Plant
) -> None:
    """What is computed again meets the tensors that it saved, and gradients are to the bit."""
    if backend is not None:
        plant("merged", backend)
    inputs = random_inputs(GROUP, dtype=torch.float32)

    def gradients(attention: CheckedAttention, again: bool) -> list[Tensor]:
        def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query.sin(), key, value, GROUP, SCALE).tanh()

        if not again:
            output = layer(*inputs)
        else:
            further = {}
            if selective:
                further["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            output = checkpoint(
                layer, *inputs, use_reentrant=False, preserve_rng_state=False, **further
            )
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    used_before = CheckedAttention()
    expected = gradients(used_before, again=False)
    for attention in (CheckedAttention(), used_before):
        for got, same in zip(gradients(attention, again=True), expected, strict=True):
            assert torch.equal(got, same)


def test_long_rows_are_cropped_to_the_same_structure(plant: Plant) -> None:
    calls = plant("merged", merged_attention)
    layout = SegmentLayout([(0, 3000, -1), (3000, 1, 0), (3001, 1200, 0), (4201, 50, 0)])
    CheckedAttention()(*random_inputs(layout, dtype=torch.float32), layout, SCALE)
    assert len(calls) == 2 and 1000 < calls[0] <= 1024 and calls[1] == layout.num_tokens
    plant("merged", wrong_forward)
    with pytest.raises(RuntimeError, match="output is off by"):
        CheckedAttention("merged")(*random_inputs(layout, dtype=torch.float32), layout, SCALE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_margin_of_good_backends(dtype: torch.dtype) -> None:
    """Tolerances are not so tight that another machine's rounding would cross them."""
    forests = [*FORESTS.values(), list(GROUP.segments)]
    forests += [random_forest(seed, num_segments=12, longest=30) for seed in range(3)]
    for segments in forests:
        layout = SegmentLayout(segments)
        inputs = random_inputs(layout, dtype=dtype, head_size=32)
        agreement = agreement_with_reference(merged_attention, *inputs, layout, SCALE)
        assert agreement.holds and agreement.error < agreement.tolerance / 2, (segments, agreement)


def test_sums_that_cancel_are_measured_against_the_reference_itself() -> None:
    """Keys far from 0, as biases make them: any bf16 kernel is off, and none is at fault."""
    query, key, value = random_inputs(GROUP, dtype=torch.bfloat16)
    offset = torch.zeros(8).index_fill_(0, torch.tensor([0]), CANCELLING_OFFSET)
    key = (key + offset).bfloat16()
    query = (query * (offset == 0)).bfloat16()  # scores stay as they were
    agreement = agreement_with_reference(merged_attention, query, key, value, GROUP, SCALE)
    assert agreement.holds and agreement.tolerance > 0.05
    agreement = agreement_with_reference(wrong_forward, query, key, value, GROUP, SCALE)
    assert not agreement.holds and agreement.name == "output"


def test_an_agreement_with_nan_does_not_hold() -> None:
    assert Agreement("output", 0.1, 0.1).holds
    assert not Agreement("output", float("nan"), 0.1).holds


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="model.attention is 'flash'; it is one of auto, ref"):
        CheckedAttention("flash")
    with pytest.raises(ValueError, match="one row of 320 tokens"):
        CheckedAttention()(*random_inputs(SegmentLayout(FORESTS["one segment"])), GROUP)


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    half, cuda = torch.bfloat16, torch.device("cuda", 0)
    npu = cast(torch.device, types.SimpleNamespace(type="npu"))  # torch-npu makes the name known
    mps = torch.device("mps")
    assert backends_in_order(CPU, torch.float32, 64, LONG_ROW) == ("merged", "reference")
    assert backends_in_order(CPU, torch.float32, 64, SHORT) == ("padded", "merged", "reference")
    assert backends_in_order(mps, half, 64, SHORT) == ("merged", "reference")
    assert backends_in_order(npu, half, 64, LONG_ROW) == ("npu", "merged", "reference")
    assert backends_in_order(mps, half, 64, LONG_ROW) == ("merged", "reference")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert backends_in_order(cuda, half, 128, LONG_ROW) == ("varlen", "flex", "merged", "reference")
    assert backends_in_order(cuda, torch.float32, 128, LONG_ROW) == ("flex", "merged", "reference")
    assert backends_in_order(cuda, half, 100, LONG_ROW) == ("flex", "merged", "reference")
    assert backends_in_order(cuda, torch.float64, 64, LONG_ROW) == ("merged", "reference")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert backends_in_order(cuda, half, 128, LONG_ROW) == ("merged", "reference")
    for device in (CPU, npu, mps, cuda):
        assert backends_in_order(device, half, 64, SegmentLayout([(0, 256, -1)])) == ("reference",)
        assert len(backends_in_order(device, half, 64, SegmentLayout([(0, 257, -1)]))) > 1


def only_first_child_sees_its_parent(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    segments = [
        (start, length, parent if index < 2 else -1)
        for index, (start, length, parent) in enumerate(layout.segments)
    ]
    return reference_attention(query, key, value, SegmentLayout(segments), scale)


def only_parents_are_seen(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """Right for prompts and their responses; what is above a parent is forgotten."""
    segments = layout.segments
    mask = layout.dense_mask(CPU).clone()
    for start, length, parent in segments:
        while parent >= 0 and segments[parent][2] >= 0:
            parent = segments[parent][2]
            above, above_length, _ = segments[parent]
            mask[start : start + length, above : above + above_length] = False
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


ALONE = SegmentLayout([(0, 300, -1), (300, 200, -1)])
CHAIN = SegmentLayout([(0, 300, -1), (300, 200, 0)])
TREE = SegmentLayout([(0, 200, -1), (200, 100, 0), (300, 40, 1), (340, 40, 1), (380, 40, 0)])


@pytest.mark.parametrize("wanted", ["auto", "varlen"])
@pytest.mark.parametrize(
    ("backend", "before", "row"),
    [
        (only_first_child_sees_its_parent, SegmentLayout([(0, 1, -1), (1, 1, 0)]), GROUP),
        (only_first_child_sees_its_parent, SegmentLayout([(0, 30, -1), (30, 2, 0)]), GROUP),
        (only_first_child_sees_its_parent, ALONE, GROUP),
        (only_first_child_sees_its_parent, CHAIN, GROUP),
        (only_parents_are_seen, GROUP, TREE),
    ],
)
def test_a_simpler_row_clears_nothing(
    backend: Backend,
    before: SegmentLayout,
    row: SegmentLayout,
    wanted: str,
    plant: Plant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run's first rows are a probe's or a stand-in's, of two tokens; choice as on a GPU."""
    plant("varlen", backend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        attention_check,
        "backends_in_order",
        lambda _, *args: backends_in_order(torch.device("cuda", 0), *args),
    )
    attention = CheckedAttention(wanted)
    inputs = random_inputs(before, dtype=torch.bfloat16)
    output = attention(*inputs, before, SCALE)
    expected = reference_attention(*inputs, before, SCALE)
    torch.testing.assert_close(output, expected, rtol=0, atol=5e-2)
    inputs = random_inputs(row, dtype=torch.bfloat16)
    if wanted == "varlen":
        with pytest.raises(RuntimeError, match="varlen on cpu .*does not agree"):
            attention(*inputs, row, SCALE)
    else:
        output = attention(*inputs, row, SCALE)  # of merged
        expected = reference_attention(*inputs, row, SCALE)
        torch.testing.assert_close(output, expected, rtol=0, atol=5e-2)


def test_tiny_rows_of_a_named_backend_are_judged_apart(plant: Plant) -> None:
    calls = plant("merged", merged_attention)
    tiny = SegmentLayout([(0, 5, -1), (5, 3, 0), (8, 1, 0)])
    attention = CheckedAttention("merged")
    for layout, runs in ((tiny, 2), (GROUP, 2), (tiny, 1), (GROUP, 1)):
        calls.clear()
        attention(*random_inputs(layout), layout, SCALE)
        assert len(calls) == runs
    plant("merged", wrong_forward)
    with pytest.raises(RuntimeError, match="tiny rows.*output is off by"):
        CheckedAttention("merged")(*random_inputs(tiny), tiny, SCALE)


def test_each_shape_of_row_is_checked(plant: Plant) -> None:
    calls = plant("merged", merged_attention)
    attention = CheckedAttention()
    for runs in (2, 1):  # with the check, and without
        for layout in (ALONE, CHAIN, GROUP, TREE):
            calls.clear()
            attention(*random_inputs(layout, dtype=torch.float32), layout, SCALE)
            assert len(calls) == runs
