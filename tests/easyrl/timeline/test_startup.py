"""Equations (12) and (13) against batches that were computed by hand."""

from __future__ import annotations

import pytest

from easyrl.timeline.spans import Span
from easyrl.timeline.startup import most_at_once, startup_times


def group(start_s: float, end_s: float) -> Span:
    return Span("producer 0", "group", start_s, end_s)


def test_equations_12_and_13() -> None:
    groups = [group(0, 3), group(0, 5), group(5, 6), group(5.5, 9.5)]  # two at a time
    times = startup_times(groups, 2)
    assert times is not None
    assert times.sync_s == 5 + 4 and times.async_s == 3 and times.ratio == 3
    assert times.first_group_s == 3 and times.last_group_s == 9.5
    assert most_at_once(groups) == 2
    assert startup_times([], 2) is None
    with pytest.raises(ValueError, match="has to be positive"):
        startup_times(groups, 0)
