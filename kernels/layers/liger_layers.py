"""RMSNorm, rotary embedding and SwiGLU by Liger Kernel's Triton kernels: one each, forward and
backward, that reads and writes each number once (Hsu et al., "Liger Kernel", arXiv 2410.10989).

Arguments as in ``plain``. A graph may be gone through backwards once: these kernels write gradients
over what was saved and over the gradient that they get.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    function = _liger("rms_norm").LigerRMSNormFunction
    # Llama's casts, which all our architectures have; the gradient that it gets is a residual's too
    output: Tensor = function.apply(x, weight, eps, 0.0, "llama", False)
    return output


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    function = _liger("rope").LigerRopeFunction
    # The kernel turns its inputs in place. Without a norm in between these are what a matrix
    # product gave, which selective checkpointing keeps and would turn a second time.
    return function.apply(query.clone(), key.clone(), cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    output: Tensor = _liger("swiglu").LigerSiLUMulFunction.apply(gate, up)
    return output


@cache
def _liger(module: str) -> ModuleType:
    try:
        return import_module(f"liger_kernel.ops.{module}")
    except ImportError as error:
        raise ImportError(
            f"liger needs the packages liger-kernel and triton ({error}); install them, or choose "
            "none"
        ) from error
