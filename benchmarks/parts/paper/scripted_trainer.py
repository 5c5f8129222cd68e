"""A trainer whose micro-batches take a set time, as if on devices of their own.

``python -m benchmarks.parts.paper.scripted_trainer SECONDS_PER_TOKEN CONFIG [key=value …]``: it
trains, and sleeps as long for each token of a micro-batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from easyrl.engines.base import MetricSums
from easyrl.engines.deepspeed.engine import DeepSpeedEngine
from easyrl.schema import MicroBatch
from easyrl.train import main


def sleep_per_token(seconds_per_token: float) -> None:
    """From now on, in this process."""
    original = DeepSpeedEngine.forward_backward

    def forward_backward(
        self: DeepSpeedEngine, micro_batches: Sequence[MicroBatch]
    ) -> list[MetricSums]:
        time.sleep(seconds_per_token * sum(row.num_tokens for row in micro_batches))
        return original(self, micro_batches)

    DeepSpeedEngine.forward_backward = forward_backward  # type: ignore[method-assign]


if __name__ == "__main__":
    sleep_per_token(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
