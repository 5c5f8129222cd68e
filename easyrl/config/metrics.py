"""Section ``metrics``: what metrics are called where they are shown."""

from __future__ import annotations

from typing import Literal

from easyrl.config.base import Section


class MetricsConfig(Section):
    """Metrics in trackers and on the console (docs/metrics.md)."""

    names: Literal["easyrl", "trl", "verl"] = "easyrl"  # whose names are shown where they mean the
    # same; metrics.jsonl has ours
