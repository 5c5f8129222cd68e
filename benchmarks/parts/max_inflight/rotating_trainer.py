"""The trainer, with ``auto`` for its first batches and a given number in flight for each later one.

``python rotating_trainer.py CHOICE.json LIMIT,LIMIT,… CONFIG [key=value …]`` runs ``easyrl.train``.
What ``auto`` has come to in the first ``NUM_UNCOUNTED`` batches goes to CHOICE.json; the batches
behind them have the limits of the list, one each. So all are measured in one process, in turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_UNCOUNTED = 5  # batches in which ``auto`` may try


def rotate(choice_file: Path, limits: Sequence[int]) -> None:
    """Replaces what the limits come to at the end of the batches behind the first ones."""
    # worker processes import this file again, and need none of it
    from easyrl.inference_client.pool.inflight_limits import InflightLimits

    end_batch = InflightLimits.end_batch
    ended = 0

    def end_batch_of_the_list(self: InflightLimits) -> None:
        nonlocal ended
        adaptive = list(self._adaptive.values())
        is_of_batch = any(limit.num_responses for limit in adaptive)
        end_batch(self)
        if not is_of_batch:
            return  # the push before the first batch
        ended += 1
        if ended == NUM_UNCOUNTED:
            choice_file.write_text(json.dumps([limit.max_inflight for limit in adaptive]))
        if NUM_UNCOUNTED <= ended < NUM_UNCOUNTED + len(limits):
            for limit in adaptive:
                limit.max_inflight = min(limits[ended - NUM_UNCOUNTED], limit.most)

    InflightLimits.end_batch = end_batch_of_the_list  # type: ignore[method-assign]


def main() -> int:
    rotate(Path(sys.argv[1]), [int(limit) for limit in sys.argv[2].split(",")])
    from easyrl.train import main as train

    return train(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
