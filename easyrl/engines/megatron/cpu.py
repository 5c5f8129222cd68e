"""megatron-core on CPUs: what it asks of CUDA there, redirected."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def redirect_cuda() -> None:
    """megatron-core 0.16 names CUDA where it means the device of the process.

    Where there is no CUDA its calls go to the CPU; where there is, nothing changes. It affects the
    whole process, so an engine calls it, and nobody else.
    """
    if torch.cuda.is_available() or getattr(torch.cuda, "_easyrl_redirected", False):
        return
    with torch.device("meta"):  # looks up at its first use which functions it redirects itself
        torch.empty(0)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    for name in ("empty", "zeros", "ones", "tensor", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda._easyrl_redirected = True


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(create)
    def created(*args: Any, **settings: Any) -> torch.Tensor:
        if str(settings.get("device", "")).startswith("cuda"):
            settings["device"] = "cpu"
        return create(*args, **settings)

    return created
