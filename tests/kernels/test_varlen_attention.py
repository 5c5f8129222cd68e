"""The gathered form of shared-prompt attention, over stand-ins for the kernels that need a GPU."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from easyrl.kernels.attention.path_gather import gather_tokens
from easyrl.kernels.attention.segment_layout import Paths, SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import reference_attention
from easyrl.kernels.attention.varlen_attention import (
    VarlenKernel,
    flash_kernel,
    installed_kernel,
    torch_kernel,
    varlen_attention_backend,
)
from tests.kernels.flash_stand_in import (
    SCALE,
    causal_by_sequence,
    flash_attention_on_cpu,  # noqa: F401, a fixture
    lengths,
)
from tests.kernels.forests import ALL_FORESTS, FORESTS, output_and_gradients, random_inputs
from tests.kernels.memory_recorder import PeakMemory

CPU = torch.device("cpu")


def top_left_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float
) -> Tensor:
    """As flash attention before version 2.1: the first query sees the first key alone."""
    queries, keys = paths.query_starts.tolist(), paths.key_starts.tolist()
    long = [end - start for start, end in zip(queries, queries[1:], strict=False)]
    index = torch.cat([torch.arange(k, k + length) for k, length in zip(keys, long, strict=False)])
    own = lengths(paths.query_starts, paths.query_starts, paths.max_query, paths.max_query)
    return causal_by_sequence(query, key[index], value[index], own, scale)


def assert_agrees_with_the_reference(
    layout: SegmentLayout, kernel: VarlenKernel, kv_heads: int = 2
) -> None:
    inputs = random_inputs(layout, kv_heads=kv_heads)
    output = varlen_attention_backend(*inputs, layout, SCALE, kernel=kernel)
    got = output_and_gradients(output, inputs)
    expected = output_and_gradients(reference_attention(*inputs, layout, SCALE), inputs)
    for tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ALL_FORESTS)
def test_agrees_with_the_reference(name: str, kv_heads: int) -> None:
    """Forward and backward, float64."""
    layout = SegmentLayout(ALL_FORESTS[name])
    assert_agrees_with_the_reference(layout, causal_by_sequence, kv_heads)


def test_another_alignment_is_noticed() -> None:
    layout = SegmentLayout(FORESTS["ragged group"])
    with pytest.raises(AssertionError, match="not close"):
        assert_agrees_with_the_reference(layout, top_left_by_sequence)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["ragged group", "two groups", "random 0"])
@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_torch_kernel_through_pytorchs_own_function(name: str, kv_heads: int) -> None:
    """All of ``varlen_attn`` but the GPU kernel below it, forward and backward."""
    assert_agrees_with_the_reference(SegmentLayout(ALL_FORESTS[name]), torch_kernel, kv_heads)


@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_nothing_of_the_paths_length_is_kept() -> None:
    layout = SegmentLayout([(0, 40, -1), *((40 + i, 1, 0) for i in range(20))])
    inputs = random_inputs(layout)
    with PeakMemory(*inputs) as memory:
        output = varlen_attention_backend(*inputs, layout, SCALE, kernel=torch_kernel)
        gc.collect()
        alive = memory.alive
    tokens, (paths,) = layout.num_tokens, layout.paths(CPU)
    assert memory.peak > 2 * len(paths.key_index) * 2 * 8
    # The output, and what goes with the layout: the index and lengths.
    assert alive <= tokens * 4 * (8 + 1) + len(paths.key_index) + 4 * len(layout.segments)
    assert output.requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", ["ragged group", "depth three", "random 0"])
@pytest.mark.usefixtures("flash_attention_on_cpu")
def test_other_dtypes(name: str, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    """Against float64; relative to the largest entry where that is above 1."""
    layout = SegmentLayout(ALL_FORESTS[name])
    inputs = random_inputs(layout, kv_heads=kv_heads, dtype=dtype)
    output = varlen_attention_backend(*inputs, layout, SCALE, kernel=torch_kernel)
    assert output.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for tensor, right in zip(output_and_gradients(output, inputs), expected, strict=True):
        limit = tolerance * max(1.0, float(right.abs().max()))
        torch.testing.assert_close(tensor, right, rtol=0, atol=limit)


Documented = Callable[..., Tensor | tuple[Tensor, Tensor]]


def packaged(seen: dict[str, object], returns_logsumexp: bool) -> Documented:
    """``flash_attn_varlen_func`` with the parameters that FlashAttention 2 and 3 share."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert causal and window_size == (-1, -1) and softcap == 0.0
        assert softmax_scale is not None
        seen["deterministic"] = deterministic
        paths = lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        output = causal_by_sequence(q, k, v, paths, softmax_scale)
        return (output, output.new_zeros(())) if returns_logsumexp else output

    return flash_attn_varlen_func


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, object]]]:
    """Puts a package with a ``flash_attn_varlen_func`` in place; the others are absent."""
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)

    def put(name: str, version: str | None, logsumexp: bool = False) -> dict[str, object]:
        seen: dict[str, object] = {}
        module = types.ModuleType(name)
        if version is not None:
            module.__version__ = version  # type: ignore[attr-defined]
        module.flash_attn_varlen_func = packaged(seen, logsumexp)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        return seen

    installed_kernel.cache_clear()
    yield put
    installed_kernel.cache_clear()


def test_packages_are_called_as_they_document(packages: Callable[..., dict[str, object]]) -> None:
    layout = SegmentLayout(FORESTS["depth three"])
    second, third = packages("flash_attn", "2.8.3"), packages("flash_attn_interface", None, True)
    assert_agrees_with_the_reference(layout, installed_kernel(9))
    assert third == {"deterministic": False} and second == {}
    torch.use_deterministic_algorithms(True)
    try:
        assert_agrees_with_the_reference(layout, installed_kernel(8))  # no third on Ampere
    finally:
        torch.use_deterministic_algorithms(False)
    assert second == {"deterministic": True}


def test_pytorchs_own_without_a_package_that_will_do(
    packages: Callable[..., dict[str, object]],
) -> None:
    assert installed_kernel(9) is torch_kernel


def test_a_package_without_deterministic_is_too_old(
    packages: Callable[..., dict[str, object]],
) -> None:
    """As FlashAttention up to 2.4.0, which was never told, and 2.0, aligned at the top left."""
    packages("flash_attn", "2.4.0")
    recent = sys.modules["flash_attn"].flash_attn_varlen_func

    def flash_attn_varlen_func(q: Tensor, *, causal: bool = False) -> Tensor: ...

    sys.modules["flash_attn"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore
    assert installed_kernel(8) is torch_kernel
    installed_kernel.cache_clear()
    sys.modules["flash_attn"].flash_attn_varlen_func = recent  # type: ignore
    assert installed_kernel(8) is not torch_kernel


def test_without_any_kernel_the_error_says_what_to_do(
    packages: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(query: Tensor, key: Tensor, *, scale: float | None = None) -> None: ...

    older = types.ModuleType("torch.nn.attention.varlen")
    older.varlen_attn = varlen_attn  # type: ignore[attr-defined]
    for module in (None, older):
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        with pytest.raises(
            ImportError, match="flash-attn 2.4.1 or later.* or choose merged or flex"
        ):
            installed_kernel(8)


def test_lengths_are_made_once_and_go_with_their_layout() -> None:
    layout = SegmentLayout(FORESTS["depth three"])
    (paths,) = layout.paths(CPU)
    assert paths.query_starts.tolist() == [0, 3, 5, 7, 8, 10, 13]
    assert paths.key_starts.tolist() == [0, 3, 8, 15, 23, 30, 36]
    assert (paths.max_query, paths.max_key) == (3, 8)
    assert layout.paths(CPU)[0] is paths
    alive = weakref.ref(layout)
    del layout
    gc.collect()
    assert alive() is None


def test_gradients_of_copies_are_summed_in_float32() -> None:
    """Added in bfloat16 one by one, 1 + 256 · 2⁻⁹ stays 1."""
    tokens = torch.ones(2, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([1] + 256 * [0] + [0])
    weights = torch.full((len(index), 1, 8), 2.0**-9, dtype=torch.bfloat16)
    weights[-1] = 1
    (gather_tokens(tokens, index) * weights).sum().backward()
    assert tokens.grad is not None and tokens.grad.dtype == torch.bfloat16
    assert tokens.grad[:, 0, 0].tolist() == [1.5, 2.0**-9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gather_is_the_derivative_of_indexing(dtype: torch.dtype) -> None:
    tokens = torch.randn(5, 2, 3, dtype=dtype, requires_grad=True)
    index = torch.tensor([0, 1, 0, 4, 4, 2])
    weights = torch.randn(6, 2, 3, dtype=dtype)
    assert torch.equal(gather_tokens(tokens, index), tokens[index])
    (got,) = torch.autograd.grad((gather_tokens(tokens, index) * weights).sum(), tokens)
    (expected,) = torch.autograd.grad((tokens[index] * weights).sum(), tokens)
    torch.testing.assert_close(got, expected)


class _OnDevice:
    """What the choice of a kernel looks at."""

    def __init__(self, device: str, dtype: torch.dtype, head_size: int) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.shape = (1, 4, 10, head_size)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "capability", "message"),
    [
        ("cpu", torch.bfloat16, 64, 8, "varlen runs on CUDA devices.* on cpu; choose merged"),
        ("cuda:0", torch.float32, 64, 8, "not torch.float32; train in bf16, or choose merged"),
        ("cuda:0", torch.bfloat16, 60, 8, "multiples of 8 up to 256, not 60; choose merged"),
        ("cuda:0", torch.bfloat16, 264, 8, "multiples of 8 up to 256, not 264"),
        ("cuda:0", torch.float16, 64, 7, r"needs compute capability 8.0 .*cuda:0 has 7"),
    ],
)
def test_what_flash_attention_does_not_take_is_refused(
    device: str,
    dtype: torch.dtype,
    head_size: int,
    capability: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    with pytest.raises(ValueError, match=message):
        flash_kernel(_OnDevice(device, dtype, head_size))  # type: ignore[arg-type]


def test_a_gpu_that_will_do_gets_a_kernel(
    packages: Callable[..., dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query = _OnDevice("cuda:0", torch.bfloat16, 128)
    assert flash_kernel(query) is torch_kernel  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL_FORESTS)
def test_on_a_gpu_it_agrees_with_the_reference(
    name: str, dtype: torch.dtype, kv_heads: int
) -> None:
    """The kernel that is chosen and PyTorch's own, against float64; relative to the largest."""
    layout = SegmentLayout(ALL_FORESTS[name])
    inputs = random_inputs(layout, kv_heads=kv_heads, head_size=64, dtype=dtype, device="cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = output_and_gradients(reference_attention(*exact, layout, SCALE), exact)
    for kernel in (None, torch_kernel):
        output = varlen_attention_backend(*inputs, layout, SCALE, kernel=kernel)
        for tensor, right in zip(output_and_gradients(output, inputs), expected, strict=True):
            torch.testing.assert_close(tensor, right, rtol=0, atol=3e-2 * float(right.abs().max()))


@pytest.mark.gpu
def test_on_a_gpu_it_is_deterministic_where_asked() -> None:
    layout = SegmentLayout([(0, 700, -1)] + [(700 + 90 * i, 90, 0) for i in range(8)])
    inputs = random_inputs(layout, head_size=64, dtype=torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        once, again = (
            output_and_gradients(varlen_attention_backend(*inputs, layout, SCALE), inputs)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
