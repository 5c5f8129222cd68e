"""Fused layers that are not trusted before they have agreed with the plain ones.

As with attention: a fused kernel may be wrong for one driver, size or build, and nothing would show
it but a model that learns badly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from easyrl.kernels.layers import plain

logger = logging.getLogger(__name__)

BACKENDS = {
    "cpu": "easyrl.kernels.layers.cpu_layers",
    "liger": "easyrl.kernels.layers.liger_layers",
    "npu": "easyrl.kernels.layers.npu_layers",
}
OF_DEVICE = {"cpu": "cpu", "cuda": "liger", "npu": "npu"}  # what auto takes

# Largest error of a vector in units of its size. A fused layer rounds its inputs and its result as
# the plain one does, and less in between: two roundings of bf16 are 2^-7, and room for as much.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
_MOST_TOKENS = 512  # of a check of rotary and SwiGLU, whose kernels treat all alike
_MOST_ENTRIES = 2**23  # of a check of RMSNorm
_MANY_ROWS = 2**15  # from here on Liger's RMSNorm of short rows is another kernel


class _Use(NamedTuple):
    """What a verdict holds for."""

    layer: str
    backend: str
    device: str  # its type
    dtype: torch.dtype
    size: int
    many_rows: bool

    def __str__(self) -> str:
        return (
            f"{self.backend}'s {self.layer} on {self.device} in {self.dtype} of size {self.size}"
            f"{' for many rows' * self.many_rows}"
        )


class CheckedLayers:
    """RMSNorm, rotary embedding and SwiGLU by the backend that is wanted, each checked at its first
    use.

    ``wanted``: ``"cpu"``, ``"liger"`` or ``"npu"``; ``"none"`` for the plain ones; ``"auto"`` for
    what the device has: cpu, liger on CUDA, npu on Ascend. At the first use of a layer with some
    device type, dtype and size it is compared with the plain one in higher precision, on the
    tensors of that call or a part of them, forward and backward. One that is off, or raises, is not
    used again: ``auto`` warns once and takes the plain one, a backend that was named raises
    ``RuntimeError``. One object belongs to one model.
    """

    def __init__(self, wanted: str = "auto") -> None:
        if wanted not in ("auto", "none", *BACKENDS):
            raise ValueError(
                f"model.fused_layers is {wanted!r}; it is one of auto, {', '.join(BACKENDS)}, none"
            )
        self.wanted = wanted
        self._trusted: dict[_Use, bool] = {}

    def backend_on(self, device: torch.device) -> str:
        """The one that is wanted there, ``"none"`` for none."""
        return OF_DEVICE.get(device.type, "none") if self.wanted == "auto" else self.wanted

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` [..., D], ``weight`` [D]; see ``plain.rms_norm``."""
        output: Tensor = self._run("rms_norm", (x, weight), (eps,))
        return output

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``query``, ``key`` [1, H, T, D], ``cos``, ``sin`` [1, T, D]; see ``plain.rotary``."""
        output: tuple[Tensor, Tensor] = self._run("rotary", (query, key, cos, sin), ())
        return output

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """``gate`` and ``up`` [..., D]; see ``plain.swiglu``."""
        output: Tensor = self._run("swiglu", (gate, up), ())
        return output

    def _run(self, layer: str, tensors: tuple[Tensor, ...], others: tuple[float, ...]) -> Any:
        first = tensors[0]
        backend = self.backend_on(first.device)
        if backend == "none":
            return getattr(plain, layer)(*tensors, *others)
        size = first.shape[-1]
        many = layer == "rms_norm" and first.numel() // size >= _MANY_ROWS
        use = _Use(layer, backend, first.device.type, first.dtype, size, many)
        if use not in self._trusted:
            self._trusted[use] = self._check(use, tensors, others)
        function = getattr(import_module(BACKENDS[backend]) if self._trusted[use] else plain, layer)
        return function(*tensors, *others)

    def _check(self, use: _Use, tensors: tuple[Tensor, ...], others: tuple[float, ...]) -> bool:
        problem: str | None = None
        cause: Exception | None = None
        error = 0.0
        try:
            fused = getattr(import_module(BACKENDS[use.backend]), use.layer)
            error, tolerance = disagreement(use.layer, fused, tensors, others)
        except torch.OutOfMemoryError:
            raise  # says nothing about the backend
        except Exception as raised:
            problem, cause = f"failed: {raised}", raised
        else:
            figure = f"(off by {error:.1e} of its size; {tolerance:.0e} is tolerated)"
            if error <= tolerance:  # False for NaN
                logger.info("%s agrees with the plain layer %s", use, figure)
                return True
            problem = f"does not agree with the plain layer {figure}"
        if self.wanted != "auto":
            raise RuntimeError(
                f"{use} {problem}. Set model.fused_layers to auto, which takes them where they "
                "work, or to none"
            ) from cause
        logger.warning("%s %s; the plain layer is used instead", use, problem)
        return False


def disagreement(
    layer: str, fused: Callable[..., Any], tensors: Sequence[Tensor], others: Sequence[float]
) -> tuple[float, float]:
    """The largest error of ``fused``'s outputs and gradients, and the one that is tolerated.

    Errors are those of a vector (the last dimension) in units of its size, or of the mean size if
    that is more, against the plain layer in higher precision. Tolerated is what ``TOLERANCES`` says
    or, where that is more, three times what the plain layer is off by in the inputs' own dtype.
    Leaves no trace in autograd or checkpointing.
    """
    reference = getattr(plain, layer)
    first = tensors[0]
    # Recording gradients, whatever the caller does; and unseen by its checkpointing.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(first.device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        _disable_current_modes(),  # selective checkpointing's
    ):
        inputs = _cropped(layer, tensors)
        generator = torch.Generator().manual_seed(0)
        precise = torch.float64 if first.device.type in ("cpu", "cuda") else torch.float32
        weights: list[Tensor] = []

        def run(compute: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
            leaves = [x.to(dtype, copy=True) for x in inputs]
            wanting = [x.requires_grad_() for x in leaves[:2]]  # angles have no gradient
            outputs = compute(*(x * 1 for x in leaves), *others)  # kernels may write over inputs
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for output in outputs[len(weights) :]:
                weights.append(torch.randn(output.shape, generator=generator).to(output.device))
            given = [w.to(inputs[0].dtype).to(dtype) for w in weights]
            results = [x.detach().clone() for x in outputs]
            return results + list(torch.autograd.grad(outputs, wanting, given))

        expected = run(reference, precise)

        def error(compute: Callable[..., Any]) -> float:
            got = run(compute, first.dtype)
            return max(map(_error, got, expected), key=lambda e: float("inf") if e != e else e)

        of_fused, tolerance = error(fused), TOLERANCES[first.dtype]
        if not of_fused <= tolerance:
            tolerance = max(tolerance, 3 * error(reference))
        return of_fused, tolerance


def _cropped(layer: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of a part of ``tensors``, in the memory order of a model's."""
    if layer == "rms_norm":
        x, weight = (x.detach() for x in tensors)
        rows = x.flatten(0, -2)
        return [rows[: max(1, _MOST_ENTRIES // rows.shape[1])].clone(), weight.clone()]
    return [x.detach()[..., :_MOST_TOKENS, :].clone() for x in tensors]


def _error(got: Tensor, expected: Tensor) -> float:
    size = expected.norm(dim=-1)
    size = size.clamp(min=max(float(size.mean()), 1e-30))
    return float(((got.to(expected) - expected).norm(dim=-1) / size).max())
