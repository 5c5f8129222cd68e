"""What ranks could do that know all groups beforehand and move them for nothing."""

from __future__ import annotations

import heapq

from benchmarks.parts.balance.idle import Trained
from benchmarks.parts.balance.workload import Load


def longest_first(load: Load, num_ranks: int) -> list[Trained]:
    """A rank that is free takes the longest of the finished groups, whose times are known exactly.

    Nobody waits while there is one, and the last ones to be taken are short: what is left of
    waiting bounds from above what the best assignment has.
    """
    rows: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
    begun: list[dict[int, float]] = [{} for _ in range(num_ranks)]
    free = [(0.0, rank) for rank in range(num_ranks)]
    coming = sorted(range(len(load.arrivals_s)), key=load.arrivals_s.__getitem__, reverse=True)
    ready: list[tuple[float, int]] = []
    while coming or ready:
        now, rank = heapq.heappop(free)
        if not ready:
            now = max(now, load.arrivals_s[coming[-1]])
        while coming and load.arrivals_s[coming[-1]] <= now:
            group = coming.pop()
            heapq.heappush(ready, (-load.train_s[group], group))
        _, group = heapq.heappop(ready)
        begun[rank][group] = now
        rows[rank].append((now, now + load.train_s[group]))
        heapq.heappush(free, (now + load.train_s[group], rank))
    return [Trained(*each) for each in zip(rows, begun, strict=True)]
