"""The operators' declarations in torch-npu 2.13.0's wheel."""

from __future__ import annotations

import importlib.metadata
import os
import zipfile

import pytest

WHEEL = "EASYRL_TORCH_NPU_WHEEL"
FILE = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


def torch_npu_declarations() -> str:
    """The package cannot be imported without CANN: a wheel will do, where ``WHEEL`` names one.

    Skips the test where there is neither.
    """
    if WHEEL in os.environ:
        with zipfile.ZipFile(os.environ[WHEEL]) as wheel:
            return wheel.read(FILE).decode()
    try:
        files = importlib.metadata.files("torch-npu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"torch-npu is not installed, and {WHEEL} names no wheel of it")
    (path,) = (file for file in files if str(file) == FILE)
    return path.read_text()
