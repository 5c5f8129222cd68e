"""Tokens per second and device, and how long inference idled, for each step."""

from __future__ import annotations

from typing import Protocol


class IdleCounter(Protocol):
    """What knows how long the endpoints had nothing to do (``EndpointPool``)."""

    def idle_s(self) -> float: ...


class Throughput:
    """Adds ``throughput/*`` and ``time/inference_idle_s`` to a step's metrics.

    Tokens are those that went through the trainer: each prompt once per group, and all responses.
    Devices are the trainer's and the inference endpoints' together (paper §6, TPSPD).
    """

    def __init__(self, pool: IdleCounter, num_devices: int) -> None:
        self._pool = pool
        self._num_devices = num_devices
        self._idle_s = pool.idle_s()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        idle_s = self._pool.idle_s()
        metrics["time/inference_idle_s"] = idle_s - self._idle_s
        self._idle_s = idle_s
        if "tokens/packed" in metrics:
            tokens_per_s = metrics["tokens/packed"] / metrics["time/step_s"]
            metrics["throughput/tokens_per_s"] = tokens_per_s
            metrics["throughput/tokens_per_s_per_device"] = tokens_per_s / self._num_devices
