"""Which errors say that another process of the run is gone."""

from __future__ import annotations

import torch.distributed as dist


class LostProcess(RuntimeError):
    """Another process of the run is gone."""


def lost_process(error: BaseException) -> str | None:
    """What ``error`` or one of its causes says of it; None: it is something else's fault.

    Gloo's are plain ``RuntimeError``s that name its transport.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_gloo = isinstance(cause, RuntimeError) and "gloo/transport" in str(cause)
        if is_gloo or isinstance(cause, LostProcess | dist.DistError):
            return str(cause)
        cause = cause.__cause__
    return None
