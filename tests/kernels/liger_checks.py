"""Liger's layers against fp64 in Triton's interpreter, and through the check at first use.

``TRITON_INTERPRET=1 python -m tests.kernels.liger_checks``: in a process of its own, because the
interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from easyrl.kernels.layers import liger_layers
from easyrl.kernels.layers.layer_check import CheckedLayers
from tests.kernels.layer_tensors import assert_exact, inputs, others

LAYERS = ("rms_norm", "rotary", "swiglu")
# In the interpreter RMSNorm's weight gradient is NaN in bf16, in float16 it is right.
DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}


def check_all(device: str) -> None:
    for layer in LAYERS:
        for dtype in DTYPES[device]:
            assert_exact(layer, getattr(liger_layers, layer), dtype, device)
            checked = CheckedLayers("liger")
            getattr(checked, layer)(*inputs(layer, dtype, device), *others(layer))
            assert list(checked._trusted.values()) == [True]
    check_inputs_are_left_alone(device)


def check_inputs_are_left_alone(device: str) -> None:
    """Selective checkpointing keeps the products that they are."""
    for layer in LAYERS:
        tensors = inputs(layer, torch.float32, device)
        before = [x.clone() for x in tensors]
        with torch.no_grad():
            getattr(liger_layers, layer)(*tensors, *others(layer))
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), layer


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


def as_compiled() -> None:
    """Two things that the compiler has and the interpreter has not: the device library's rsqrt, and
    numbers that a kernel is called with as float32."""
    from liger_kernel.ops import rms_norm

    rms_norm.rsqrt = rsqrt
    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted


if __name__ == "__main__":
    as_compiled()
    check_all("cpu")
    print("all checks passed")
