"""What turns a ``gpu`` test into a skip: an optional package, and nothing else."""

from __future__ import annotations

import importlib

import pytest

from easyrl.kernels.attention import varlen_attention
from easyrl.kernels.layers import liger_layers
from tests.optional_packages import missing_package


def raised(statement: str) -> ImportError:
    with pytest.raises(ImportError) as found:
        exec(statement)
    return found.value


def test_what_our_code_lacks_of_its_own_is_a_failure() -> None:
    assert missing_package(raised("import easyrl.no_such_module")) is None
    assert missing_package(raised("from easyrl.schema import no_such_name")) is None
    assert missing_package(raised("import torch.no_such_module")) is None
    assert missing_package(raised("raise ImportError('circular')")) is None
    assert missing_package(RuntimeError("CUDA error")) is None


def test_an_optional_package_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.sys.modules, "deepspeed", None)  # type: ignore[attr-defined]
    missing = raised("import deepspeed.ops")
    assert missing_package(missing) is missing
    error = RuntimeError("its operators cannot be built")
    error.__cause__ = missing
    assert missing_package(error) is missing
    assert missing_package(raised("from transformers import no_such_name")) is not None


def test_what_kernels_say_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel", "flash_attn", "torch.nn.attention.varlen"):
        monkeypatch.setitem(importlib.sys.modules, name, None)  # type: ignore[attr-defined]
    liger_layers._liger.cache_clear()
    varlen_attention.installed_kernel.cache_clear()
    for load in (
        lambda: liger_layers._liger("swiglu"),
        lambda: varlen_attention.installed_kernel(8),
    ):
        with pytest.raises(ImportError) as found:
            load()
        assert missing_package(found.value) is not None
