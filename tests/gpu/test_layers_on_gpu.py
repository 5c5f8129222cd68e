"""Liger's layers on a GPU against fp64."""

from __future__ import annotations

import pytest
import torch

from easyrl.kernels.layers.layer_check import CheckedLayers
from tests.gpu.device import marks

pytestmark = marks
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="Triton is not installed")


def test_against_fp64() -> None:
    from tests.kernels.liger_checks import check_all

    check_all("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_many_short_rows(dtype: torch.dtype) -> None:
    """Another kernel of Liger's; a backend that was named raises where it does not agree."""
    layers = CheckedLayers("liger")
    x = torch.randn(1, 2048, 32, 128, device="cuda", dtype=dtype)
    layers.rms_norm(x, torch.rand(128, device="cuda", dtype=dtype), 1e-6)
    assert list(layers._trusted.values()) == [True]
