"""When rows are ready, and what no schedule of them could beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The last row of a script comes after this many times the work of one stage.
LAST = {"at once": 0.0, "even": 1.0, "slow": 2.0, "long tail": 1.5}


def script(name: str, num_rows: int, stage_s: float, seed: int = 0) -> list[float]:
    """Seconds from the start, ascending; ``stage_s``: of a stage's work on all rows."""
    last_s = LAST[name] * stage_s
    if name != "long tail":
        return np.linspace(last_s / num_rows, last_s, num_rows).tolist()
    lengths = np.sort(np.random.default_rng(seed).lognormal(0.0, 0.8, num_rows))
    return (lengths / lengths[-1] * last_s).tolist()


def bound_s(arrivals: Sequence[float], row_s: float, num_stages: int) -> float:
    """What a pipeline of equal stages needs at least: from each row on, all that is left goes
    through one stage, and the last row through the others too.

    ``row_s``: a stage's forward and backward of one row.
    """
    left = range(len(arrivals), 0, -1)
    busy = max(at + count * row_s for at, count in zip(arrivals, left, strict=True))
    return busy + (num_stages - 1) * row_s
