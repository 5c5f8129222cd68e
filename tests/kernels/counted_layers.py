"""A stand-in for a backend of fused layers: the plain ones, counted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from easyrl.kernels.layers import layer_check, plain

LAYERS = ("rms_norm", "rotary", "swiglu")


def counted_backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Is ``liger``, and what ``auto`` takes on a CPU; ``calls`` are the layers in their order."""
    module = types.ModuleType("counted_layers")
    module.calls = []  # type: ignore[attr-defined]

    def counted(layer: str) -> Callable[..., Any]:
        def compute(*arguments: Any) -> Any:
            module.calls.append(layer)
            return getattr(plain, layer)(*arguments)

        return compute

    for layer in LAYERS:
        setattr(module, layer, counted(layer))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(layer_check.BACKENDS, "liger", module.__name__)
    monkeypatch.setitem(layer_check.OF_DEVICE, "cpu", "liger")
    return module
