"""The state of all generators of one process, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def random_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators, the accelerator's included."""
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, _text(np.array(internal, dtype=np.uint32)), gauss],
        "numpy": [_text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = _text(torch.get_device_module().get_rng_state().numpy())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Inverse of ``random_state``; an accelerator that was not there then keeps its own."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(_array(internal, np.uint32).tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", _array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_array(state["torch"], np.uint8)))
    if "accelerator" in state and torch.accelerator.is_available():
        value = torch.from_numpy(_array(state["accelerator"], np.uint8))
        torch.get_device_module().set_rng_state(value)


def _text(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _array(text: str, dtype: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
