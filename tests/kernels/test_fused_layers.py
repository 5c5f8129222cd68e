"""Fused RMSNorm, rotary embedding and SwiGLU: each against fp64, and what the first use refuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easyrl.kernels.layers import cpu_layers, npu_layers, plain
from easyrl.kernels.layers.layer_check import CheckedLayers
from tests.kernels.counted_layers import LAYERS, counted_backend
from tests.kernels.layer_tensors import assert_exact, inputs, others
from tests.kernels.torch_npu_declarations import torch_npu_declarations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_plain_layers_are_exact(layer: str, dtype: torch.dtype) -> None:
    assert_exact(layer, getattr(plain, layer), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_a_cpu_are_exact(layer: str, dtype: torch.dtype) -> None:
    assert_exact(layer, getattr(cpu_layers, layer), dtype)


def test_a_rotation_of_unequal_halves_has_its_own_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 9, 6), (1, 2, 9, 6), (1, 9, 6), (1, 9, 6)]
    query, key, cos, sin = (torch.randn(s, generator=generator).double() for s in shapes)
    assert torch.autograd.gradcheck(
        lambda q, k: cpu_layers.rotary(q, k, cos, sin),
        (query.requires_grad_(), key.requires_grad_()),
    )
    for got, expected in zip(
        cpu_layers.rotary(query, key, cos, sin), plain.rotary(query, key, cos, sin), strict=True
    ):
        torch.testing.assert_close(got, expected)


# ---- the check at first use ----------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Right, but for what a test puts into it."""
    return counted_backend(monkeypatch)


def run(layers: CheckedLayers, layer: str, dtype: torch.dtype = torch.float32) -> Any:
    return getattr(layers, layer)(*inputs(layer, dtype), *others(layer))


def assert_plain(got: Any, layer: str, dtype: torch.dtype = torch.float32) -> None:
    expected = getattr(plain, layer)(*inputs(layer, dtype), *others(layer))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_that_agrees_is_used_and_checked_once(
    layer: str, dtype: torch.dtype, fused: types.ModuleType
) -> None:
    layers = CheckedLayers("auto")
    assert_plain(run(layers, layer, dtype), layer, dtype)
    assert len(fused.calls) == 2  # the check's, and the call itself
    run(layers, layer, dtype)
    assert len(fused.calls) == 3
    CheckedLayers("none").rms_norm(*inputs("rms_norm", dtype), 1e-5)  # type: ignore[call-arg]
    assert len(fused.calls) == 3


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def _off(x: Tensor) -> Tensor:
    return x * 1.001


def _one_token_off(x: Tensor) -> Tensor:
    y = x.clone()
    y.select(-2, 3).mul_(1.01)
    return y


def _not_finite(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., -1, -1] = torch.nan
    return y


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("wrong", [_off, _one_token_off, _not_finite, _WrongGradient.apply])
def test_one_that_is_off_is_not_used(
    layer: str,
    wrong: Callable[[Tensor], Tensor],
    fused: types.ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = getattr(fused, layer)

    def compute(*arguments: Any) -> Any:
        output = right(*arguments)
        return tuple(map(wrong, output)) if isinstance(output, tuple) else wrong(output)

    setattr(fused, layer, compute)
    layers = CheckedLayers("auto")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_plain(run(layers, layer), layer)
    (record,) = caplog.records  # once
    assert f"{layer} on cpu in torch.float32" in record.message
    assert "does not agree" in record.message and "plain layer is used instead" in record.message
    with pytest.raises(RuntimeError, match="does not agree.*Set model.fused_layers to auto"):
        run(CheckedLayers("liger"), layer)


def test_one_that_fails_is_not_used(
    fused: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def compute(*_: Any) -> Any:
        raise ImportError("liger needs the packages")

    fused.swiglu = compute  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        assert_plain(run(CheckedLayers("auto"), "swiglu"), "swiglu")
    assert "failed: liger needs the packages" in caplog.text
    with pytest.raises(RuntimeError, match="failed: liger needs the packages"):
        run(CheckedLayers("liger"), "swiglu")


def test_a_kernel_for_many_rows_is_checked_on_many_rows(fused: types.ModuleType) -> None:
    rows: list[int] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return plain.rms_norm(x, weight, eps)

    fused.rms_norm = rms_norm  # type: ignore[attr-defined]
    layers = CheckedLayers("auto")
    for tokens in (10, 2**15, 2**15, 20):
        layers.rms_norm(torch.randn(1, tokens, 4), torch.ones(4), 1e-5)
    assert rows == [10, 10, 2**15, 2**15, 2**15, 20]


def test_a_checks_kernels_may_write_over_their_inputs(fused: types.ModuleType) -> None:
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        output = plain.swiglu(gate, up).detach()
        with torch.no_grad():
            gate.zero_()
        return output

    fused.swiglu = swiglu  # type: ignore[attr-defined]
    tensors = inputs("swiglu", torch.float32)
    before = tensors[0].clone()
    with pytest.raises(RuntimeError):  # it has no gradient
        CheckedLayers("liger").swiglu(*tensors)
    assert torch.equal(tensors[0], before)


def test_without_the_packages_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel", "liger_kernel.ops", "torch_npu"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match="needs the packages liger-kernel and triton"):
        run(CheckedLayers("liger"), "swiglu")
    with pytest.raises(RuntimeError, match="needs torch-npu and Ascend's CANN"):
        run(CheckedLayers("npu"), "rotary")


def test_another_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model.fused_layers is 'apex'.* auto, cpu, liger, npu, none"
    ):
        CheckedLayers("apex")


# ---- Liger ---------------------------------------------------------------------------------------


def test_liger_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.liger_checks"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stderr


# ---- Ascend --------------------------------------------------------------------------------------

SIGNATURES = {
    "npu_rms_norm": "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor)",
    "npu_rotary_mul": "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor",
    "npu_swiglu": "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
}


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the three operators document, with their signatures and within their limits."""

    def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
        assert self.dtype == gamma.dtype and 2 <= self.ndim <= 8
        reverse = (self.double().square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return (self.double() * reverse * gamma.double()).to(self.dtype), reverse

    def npu_rotary_mul(
        self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: None = None
    ) -> Tensor:
        batch, heads, tokens, size = self.shape  # BNSD
        assert size < 896 and size % 2 == 0 and batch < 1000 and heads < 1000
        assert r1.shape == r2.shape == (1, 1, tokens, size) and rotary_mode == "half"
        assert self.dtype == r1.dtype == r2.dtype and rotate is None
        x1, x2 = torch.chunk(self, 2, -1)
        return r1 * self + r2 * torch.cat((-x2, x1), dim=-1)

    def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
        a, b = torch.chunk(self, 2, dim)
        return a * torch.sigmoid(a) * b

    module = types.ModuleType("torch_npu")
    for operator in (npu_rms_norm, npu_rotary_mul, npu_swiglu):
        setattr(module, operator.__name__, operator)
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.usefixtures("operators")
def test_npu_layers_are_exact_over_what_the_operators_document(
    layer: str, dtype: torch.dtype
) -> None:
    assert_exact(layer, getattr(npu_layers, layer), dtype)


@pytest.mark.usefixtures("operators")
def test_npu_layers_pass_the_check() -> None:
    layers = CheckedLayers("npu")
    for layer in LAYERS:
        run(layers, layer)
    assert list(layers._trusted.values()) == [True] * 3


@pytest.mark.usefixtures("operators")
def test_heads_that_npu_rotary_mul_does_not_take_are_refused() -> None:
    angles = torch.zeros(1, 2, 896)
    with pytest.raises(ValueError, match="size below 896 .*not 1 of size 896; choose none"):
        npu_layers.rotary(torch.zeros(1, 1, 2, 896), torch.zeros(1, 1, 2, 896), angles, angles)


@pytest.mark.parametrize("operator", SIGNATURES)
def test_the_signatures_are_the_wheels(operator: str) -> None:
    assert f"func: {SIGNATURES[operator]}\n" in torch_npu_declarations()


@pytest.mark.npu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_npu_layers_on_an_npu(layer: str, dtype: torch.dtype) -> None:
    layers = CheckedLayers("npu")
    getattr(layers, layer)(*inputs(layer, dtype, "npu"), *others(layer))
    assert all(layers._trusted.values())
