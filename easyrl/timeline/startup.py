"""When training of a batch can begin: equations (12) and (13) of the paper (§4.3).

With engines that take n prompts at a time, a batch is generated in inference batches of n. A
synchronous run begins to train when all of them are done, an asynchronous one with the first
finished prompt of the first:

    T_sync = Σ_k max_i t(k, i)    (12)        T_async = min_i t(1, i)    (13)

where t(k, i) is the time of the i-th prompt of the k-th inference batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from easyrl.timeline.spans import GROUP, BatchSpans, Span, spans_of


class StartupTimes(NamedTuple):
    """Seconds from a batch's first request until training can begin."""

    sync_s: float  # by equation (12)
    async_s: float  # by equation (13)
    first_group_s: float  # measured: until the first group was complete
    last_group_s: float  # ... and the last one

    @property
    def ratio(self) -> float:
        """How many times sooner an asynchronous run begins, by the equations."""
        return self.sync_s / self.async_s


def startup_times(spans: Sequence[Span], prompts_at_once: int) -> StartupTimes | None:
    """Of one batch's groups, in their order of dispatch; None where there are none.

    ``prompts_at_once``: n, of all endpoints together. Raises ``ValueError`` if it is not positive.
    """
    if prompts_at_once < 1:
        raise ValueError(f"prompts_at_once: has to be positive, and is {prompts_at_once}")
    groups = sorted((span for span in spans if span.name == GROUP), key=lambda group: group.start_s)
    if not groups:
        return None
    batches = [
        [group.seconds for group in groups[first : first + prompts_at_once]]
        for first in range(0, len(groups), prompts_at_once)
    ]
    begin_s = groups[0].start_s
    ends = [group.end_s - begin_s for group in groups]
    return StartupTimes(sum(map(max, batches)), min(batches[0]), min(ends), max(ends))


def startup_times_of(of_ranks: Sequence[BatchSpans]) -> StartupTimes | None:
    """Of one batch of all ranks, as many prompts at once as were. None where groups are missing."""
    if any(each.left_out for each in of_ranks):
        return None
    spans = spans_of(of_ranks)
    return startup_times(spans, max(most_at_once(spans), 1))


def most_at_once(spans: Sequence[Span]) -> int:
    """Groups that were being generated at the same time, the most of one batch."""
    changes = sorted(
        (moment, change)
        for span in spans
        if span.name == GROUP
        for moment, change in ((span.start_s, 1), (span.end_s, -1))
    )
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most
