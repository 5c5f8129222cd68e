"""The calls of ``TrainEngine`` that all processes of a model-parallel group make together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from easyrl.engines.base import NonFiniteLossError, TrainEngine

END = "end"  # no more calls
# of an engine, whose result one process of the group has
ANSWERED = ("forward_backward", "evaluate", "frozen_logprobs", "logprobs")


def perform(engine: TrainEngine, call: str, arguments: Sequence[Any]) -> Any:
    """What ``engine`` returns, as ``codec`` takes it.

    ``forward_backward``: metrics by row, and what was not finite; the error goes on on the head.
    """
    if call != "forward_backward":
        return getattr(engine, call)(*arguments)
    try:
        return engine.forward_backward(*arguments), None
    except NonFiniteLossError as error:
        return [], str(error)
