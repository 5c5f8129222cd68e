"""Section ``metrics``: what metrics are called where they are shown, and where Prometheus reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from easyrl.config.base import Section


class MetricsConfig(Section):
    """Metrics in trackers and on the console (docs/metrics.md)."""

    names: Literal["easyrl", "trl", "verl"] = "easyrl"  # whose names are shown where they mean the
    # same; metrics.jsonl has ours
    prometheus_host: str = "127.0.0.1"  # of the tracker prometheus: the address that it answers at;
    # 0.0.0.0: to everybody who reaches this machine
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 9464  # 0: any that is free, which the
    # log says
