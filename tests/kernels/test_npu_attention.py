"""Shared-prompt attention on Ascend, over a stand-in for ``torch_npu.npu_fusion_attention``.

The stand-in takes what the operator's signature takes, holds it to the limits that the operator
documents, and computes what it documents for the variable-length form: sparse mode 3 aligns each
sequence's causal mask at the bottom right, mode 2 at the top left; where the compressed mask is
True a score is dropped; without a mask none is.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from easyrl.kernels.attention import npu_attention
from easyrl.kernels.attention.npu_attention import npu_attention_backend
from easyrl.kernels.attention.path_gather import most_keys
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from tests.kernels.forests import ALL_FORESTS, FORESTS, output_and_gradients, random_inputs
from tests.kernels.memory_recorder import PeakMemory
from tests.kernels.torch_npu_declarations import torch_npu_declarations

SCALE = 0.3
SIGNATURE = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, '
    "int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
PYTHON_TYPES = {"Tensor": Tensor, "int": int, "float": float, "bool": bool, "str": str}


class Operator:
    """Binds arguments as the operator's signature would, and checks their types."""

    def __init__(self) -> None:
        (parameters,) = re.findall(r"\((.*)\) ->", SIGNATURE)
        self.types: dict[str, str] = {}
        bound = []
        for parameter in parameters.split(", "):
            kind, name = parameter.partition("=")[0].split(" ")
            default = parameter.partition("=")[2]
            empty = inspect.Parameter.empty
            value = eval(default) if default else empty  # None, a number, True or ""
            bound.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD))
            bound[-1] = bound[-1].replace(default=value)
            self.types[name] = kind
        self.signature = inspect.Signature(bound)
        self.calls: list[dict[str, object]] = []

    def __call__(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        call = self.signature.bind(*args, **kwargs)
        call.apply_defaults()
        for name, value in call.arguments.items():
            self._check_type(name, value)
        self.calls.append(call.arguments)
        tensors = [call.arguments[name] for name in ("query", "key", "value")]
        output = Fused.apply(*tensors, call.arguments)
        return (output, *torch.zeros(3, 1).unbind(0), 0, 0, 0)

    def _check_type(self, name: str, value: object) -> None:
        kind = self.types[name]
        if kind.endswith("?") and value is None:
            return
        kind = kind.removesuffix("?")
        if kind.endswith("[]"):
            assert isinstance(value, list | tuple), name
            assert all(type(entry) is int for entry in value), name
        else:
            assert isinstance(value, PYTHON_TYPES[kind]), name


class Fused(torch.autograd.Function):
    """Keeps what the operator does for its backward pass, but for its softmax's statistics."""

    @staticmethod
    def forward(ctx, query, key, value, arguments):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(query, key, value)
        ctx.others = {k: v for k, v in arguments.items() if k not in ("query", "key", "value")}
        return fusion_attention(query, key, value, **ctx.others)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            output = fusion_attention(*tensors, **ctx.others)
        return (*torch.autograd.grad(output, tensors, grad), None)


def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None,
    scale: float,
    keep_prob: float,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
    **others: object,
) -> Tensor:
    """Within the limits that the operator documents; [T, N, D]."""
    assert input_layout == "TND" and query.ndim == 3 and head_num == query.shape[1]
    assert key.shape == value.shape and query.dtype == key.dtype == value.dtype
    assert query.shape[1] % key.shape[1] == 0 and keep_prob == 1.0
    assert all(x.is_contiguous() for x in (query, key, value))
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024
    assert (actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (query.shape[0], key.shape[0])
    assert max(query.shape[0], key.shape[0]) <= 1_000_000
    assert all(
        others[name] is None for name in ("pse", "padding_mask", "prefix", "sink", "dropout_mask")
    )
    group = query.shape[1] // key.shape[1]
    outputs, query_start, key_start = [], 0, 0
    for query_end, key_end in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        q = query[query_start:query_end]
        k = key[key_start:key_end].repeat_interleave(group, dim=1)
        v = value[key_start:key_end].repeat_interleave(group, dim=1)
        scores = torch.einsum("qnd,knd->nqk", q, k) * scale
        if atten_mask is not None:
            dropped = dropped_scores(atten_mask, len(q), len(k), sparse_mode)
            scores = scores.masked_fill(dropped, -torch.inf)
        outputs.append(torch.einsum("nqk,knd->qnd", scores.softmax(dim=2), v))
        query_start, key_start = query_end, key_end
    return torch.cat(outputs)


def dropped_scores(mask: Tensor, num_queries: int, num_keys: int, sparse_mode: int) -> Tensor:
    """bool [num_queries, num_keys], read off the compressed ``mask``: an entry as far from the
    diagonal as in it, the diagonal where ``sparse_mode`` puts it."""
    assert mask.shape == (2048, 2048) and mask.dtype in (torch.bool, torch.uint8)
    shift = {2: 0, 3: num_keys - num_queries}[sparse_mode]
    distance = torch.arange(num_keys)[None, :] - torch.arange(num_queries)[:, None] - shift
    above, below = distance.clamp(0, 2047), (-distance).clamp(0, 2047)
    return mask[below, above].bool()


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """The stand-in, in float64 too."""
    operator = Operator()
    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = operator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(npu_attention, "_DTYPES", (*npu_attention._DTYPES, torch.float64))
    return operator


def assert_agrees_with_the_reference(layout: SegmentLayout, kv_heads: int = 2) -> None:
    inputs = random_inputs(layout, kv_heads=kv_heads)
    got = output_and_gradients(npu_attention_backend(*inputs, layout, SCALE), inputs)
    expected = output_and_gradients(reference_attention(*inputs, layout, SCALE), inputs)
    for tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ALL_FORESTS)
def test_agrees_with_the_reference(operator: Operator, name: str, kv_heads: int) -> None:
    """Forward and backward, float64."""
    assert_agrees_with_the_reference(SegmentLayout(ALL_FORESTS[name]), kv_heads)
    assert len(operator.calls) == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", ["ragged group", "depth three", "random 0"])
@pytest.mark.usefixtures("operator")
def test_other_dtypes(name: str, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    """Against float64; relative to the largest entry where that is above 1."""
    layout = SegmentLayout(ALL_FORESTS[name])
    inputs = random_inputs(layout, kv_heads=kv_heads, dtype=dtype)
    output = npu_attention_backend(*inputs, layout, SCALE)
    assert output.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for tensor, right in zip(output_and_gradients(output, inputs), expected, strict=True):
        limit = tolerance * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(tensor, right, rtol=0, atol=limit)


def test_nothing_of_the_paths_length_is_kept(operator: Operator) -> None:
    layout = SegmentLayout([(0, 40, -1), *((40 + i, 1, 0) for i in range(20))])
    inputs = random_inputs(layout)
    cpu = torch.device("cpu")
    (paths,) = layout.paths(cpu, most_keys(inputs[1]), 1024)
    with PeakMemory(*inputs, npu_attention._dropped(cpu), paths.key_index) as memory:
        output = npu_attention_backend(*inputs, layout, SCALE)
        assert operator.calls.pop()["actual_seq_kvlen"][-1] == 860  # type: ignore[index]
        gc.collect()
        alive = memory.alive
    assert memory.peak > 2 * 860 * 2 * 8
    # Queries as the operator wants them and the output.
    assert alive <= 2 * layout.num_tokens * 4 * 8
    assert output.requires_grad


def test_segments_longer_than_the_compressed_mask(operator: Operator) -> None:
    layout = SegmentLayout([(0, 2100, -1), (2100, 40, 0), (2140, 2200, 0)])
    inputs = random_inputs(layout, heads=1, kv_heads=1, head_size=4)
    with torch.no_grad():
        output = npu_attention_backend(*inputs, layout, SCALE)
        expected = reference_attention(*inputs, layout, SCALE)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_rows_beyond_the_operators_limits_are_split(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SegmentLayout(ALL_FORESTS["random 1"])
    longest = layout.paths(torch.device("cpu"))[0].max_key
    monkeypatch.setattr(npu_attention, "_MOST_SEQUENCES", 4)
    monkeypatch.setattr(npu_attention, "_MOST_TOKENS", longest + 20)
    assert_agrees_with_the_reference(layout)
    lengths = [call["actual_seq_qlen"] for call in operator.calls]
    keys = [call["actual_seq_kvlen"] for call in operator.calls]
    assert sum(map(len, lengths)) == 15 and max(map(len, lengths)) == 4
    assert min(map(len, lengths[:-1])) < 4  # there the keys were too many
    assert max(ends[-1] for ends in keys) <= longest + 20


def test_what_the_operator_is_given(operator: Operator) -> None:
    layout = SegmentLayout(FORESTS["depth three"])
    query, key, value = random_inputs(layout, kv_heads=2)
    npu_attention_backend(query, key, value, layout, SCALE)
    (call,) = operator.calls
    assert call["actual_seq_qlen"] == [3, 5, 7, 8, 10, 13]
    assert call["actual_seq_kvlen"] == [3, 8, 15, 23, 30, 36]
    assert call["head_num"] == 4 and call["scale"] == SCALE and call["sparse_mode"] == 3
    mask, gathered = call["atten_mask"], call["key"]
    assert isinstance(mask, Tensor) and isinstance(gathered, Tensor)
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert gathered.shape == (36, 2, 8)  # key heads are not repeated


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_dropped", lambda device: torch.ones(2048, 2048, dtype=torch.bool).tril()),
        ("_dropped", lambda device: torch.ones(2048, 2048, dtype=torch.bool).triu()),
        ("_dropped", lambda device: None),
        ("_BOTTOM_RIGHT_CAUSAL", 2),
    ],
    ids=["torch's polarity", "diagonal dropped", "no mask", "top left"],
)
def test_a_wrong_mask_is_noticed(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, name: str, value: Callable[..., object]
) -> None:
    monkeypatch.setattr(npu_attention, name, value)
    with pytest.raises(AssertionError, match="not close"):
        assert_agrees_with_the_reference(SegmentLayout(FORESTS["ragged group"]))


def test_another_argument_than_the_signatures_is_noticed(operator: Operator) -> None:
    tensors = [torch.zeros(3, 1, 8) for _ in range(3)]
    with pytest.raises(TypeError, match="actual_seq_lengths"):
        operator(*tensors, head_num=1, input_layout="TND", actual_seq_lengths=[3])
    with pytest.raises(AssertionError, match="actual_seq_qlen"):
        operator(*tensors, 1, "TND", actual_seq_qlen=torch.tensor([3]), actual_seq_kvlen=[3])


def test_without_torch_npu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    layout = SegmentLayout(FORESTS["ragged group"])
    with pytest.raises(ImportError, match="needs torch-npu and Ascend's CANN .*choose merged"):
        npu_attention_backend(*random_inputs(layout), layout, SCALE)


def test_what_the_operator_does_not_take_is_refused(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    layout = SegmentLayout([(0, 2, -1)])
    for shape, message in (
        ({"dtype": torch.float64}, "not torch.float64; choose merged"),
        ({"dtype": torch.float32, "head_size": 776}, "size up to 768, not 4 of size 776"),
        ({"dtype": torch.float32, "heads": 257, "kv_heads": 1}, "up to 256 query heads.*not 257"),
    ):
        with pytest.raises(ValueError, match=message):
            npu_attention_backend(*random_inputs(layout, **shape), layout, SCALE)  # type: ignore


def test_the_signature_is_the_wheels() -> None:
    assert f"func: {SIGNATURE}\n" in torch_npu_declarations()


@pytest.mark.npu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL_FORESTS)
def test_on_an_npu_it_agrees_with_the_reference(
    name: str, dtype: torch.dtype, kv_heads: int
) -> None:
    """Against float64 on the CPU; the tolerance is relative to the largest entry."""
    layout = SegmentLayout(ALL_FORESTS[name])
    inputs = random_inputs(layout, kv_heads=kv_heads, head_size=64, dtype=dtype, device="npu")
    got = output_and_gradients(npu_attention_backend(*inputs, layout, SCALE), inputs)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for tensor, right in zip(got, expected, strict=True):
        limit = 3e-2 * float(right.abs().max())
        torch.testing.assert_close(tensor.cpu(), right, rtol=0, atol=limit)
