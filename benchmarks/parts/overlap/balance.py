"""Sets the speed of generation so that training takes a wanted share of its time.

A speed-up says something only beside its bound, which is the higher the more equal both phases are.
"""

from __future__ import annotations

from collections.abc import Callable

WANTED = (0.7, 0.8)  # training over generation
MAX_MEASUREMENTS = 5
MAX_FACTOR = 1.6  # of one change: a measurement may be far off on a busy machine


def balance(
    speed: float, measure: Callable[[float], float], slower: Callable[[float, float], float]
) -> float:
    """A speed with which training is ``WANTED`` of generation, or the nearest that was measured.

    Args:
        speed: to begin with.
        measure: training over generation with a speed, of a sync run.
        slower: the speed with which generation takes a factor more time, as far as one can say.
    """
    low, high = WANTED
    middle = (low + high) / 2
    distances: dict[float, float] = {}
    while len(distances) < MAX_MEASUREMENTS and speed not in distances:
        ratio = measure(speed)
        if low <= ratio <= high:
            return speed
        distances[speed] = abs(ratio - middle)
        speed = slower(speed, min(max(ratio / middle, 1 / MAX_FACTOR), MAX_FACTOR))
    return min(distances, key=distances.__getitem__)
