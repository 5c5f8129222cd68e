"""Expected seconds of a batch, by the requests that are in flight at an endpoint: a queueing model.

An endpoint that decodes ``m`` sequences makes ``throughput(m)`` tokens/s, the same number of each.
Groups are admitted in the order of their dispatch, as places become free. The trainer takes
finished groups in the order in which they arrive (paper §4.3), so that few requests in flight bring
the first groups early, and many finish the batch sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

Throughput = Callable[[int], float]  # sequences that are decoded → tokens/s of them together
Lengths = Sequence[int]  # tokens of each response of a group


def arrivals_s(throughput: Throughput, groups: Sequence[Lengths], max_inflight: int) -> list[float]:
    """When each group is complete, seconds after the first request; in order of arrival.

    ``groups``: in the order of their dispatch, each with at least one token.
    """
    waiting = [(length, number) for number, group in enumerate(groups) for length in group]
    waiting.reverse()
    missing = [len(group) for group in groups]
    running: list[tuple[int, int]] = []  # (``made`` at its end, group), a heap
    made = 0  # tokens of a sequence that would be there from the start
    now_s, arrived = 0.0, []
    while waiting or running:
        while waiting and len(running) < max_inflight:
            length, number = waiting.pop()
            heapq.heappush(running, (made + length, number))
        num_running, end = len(running), running[0][0]
        now_s += (end - made) * num_running / throughput(num_running)
        made = end
        while running and running[0][0] == made:
            number = heapq.heappop(running)[1]
            missing[number] -= 1
            if not missing[number]:
                arrived.append(now_s)
    return arrived


def batch_s(
    throughput: Throughput, groups: Sequence[Lengths], max_inflight: int, train_s: float
) -> float:
    """Seconds from the first request to the end of training, ``train_s`` a group."""
    end_s = 0.0
    for arrival_s in arrivals_s(throughput, groups, max_inflight):
        end_s = max(end_s, arrival_s) + train_s
    return end_s


def fastest(expected_s: Mapping[int, float], current: int, min_gain: float) -> int:
    """The limit with the fewest seconds; ``current`` unless that gains ``min_gain``, a fraction."""
    best = min(expected_s, key=expected_s.__getitem__)
    if current in expected_s and expected_s[best] > (1 - min_gain) * expected_s[current]:
        return current
    return best
