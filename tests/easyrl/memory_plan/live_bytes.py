"""Bytes of CPU tensors that come and go, from torch's own allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@contextmanager
def largest_growth() -> Iterator[list[int]]:
    """The most bytes that were allocated at once inside, beyond those at its beginning; a list of
    one, filled at the end."""
    growth: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield growth
    results = profiler.profiler.kineto_results.events()
    changes = [event for event in results if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    growth.append(max(accumulate(event.nbytes() for event in changes), default=0))
