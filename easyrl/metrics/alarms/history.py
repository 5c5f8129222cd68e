"""Medians of a run's metrics over windows of batches, which alarms are judged by."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

Metrics = Mapping[str, float | None]  # None: not finite, as metrics.jsonl keeps it


@dataclass
class Series:
    """Running medians of one figure, a window of batches each, and how they have moved.

    A batch without the figure counts in its window; a window in which fewer than half of the
    batches have it has no median.
    """

    window: int
    medians: list[float | None] = field(default_factory=list)  # of each full window, by its end

    def __post_init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=self.window)
        self._first_at: int | None = None
        self._lowest: float | None = None

    def add(self, value: float | None) -> None:
        """The next batch's."""
        self._values.append(value if value is not None and math.isfinite(value) else None)
        if len(self._values) < self.window:
            return
        known = [each for each in self._values if each is not None]
        median = statistics.median(known) if 2 * len(known) >= self.window else None
        if median is not None:
            self._first_at = len(self.medians) if self._first_at is None else self._first_at
            self._lowest = median if self._lowest is None else min(self._lowest, median)
        self.medians.append(median)

    @property
    def last(self) -> float | None:
        """The median of the last ``window`` batches."""
        return self.medians[-1] if self.medians else None

    @property
    def first(self) -> float | None:
        """That of the first window, once the last one has no batch in common with it."""
        if self._first_at is None or len(self.medians) - self._first_at <= self.window:
            return None
        return self.medians[self._first_at]

    @property
    def lowest(self) -> float | None:
        """The lowest median so far."""
        return self._lowest

    @property
    def is_at_best(self) -> bool:
        """Whether the last median is above those of all windows that ended before its own began."""
        earlier = [each for each in self.medians[: -self.window] if each is not None]
        return self.last is not None and bool(earlier) and self.last > max(earlier)


@dataclass
class History:
    """What alarms know of a run: a ``Series`` of each figure, behind the warm-up."""

    names: InitVar[tuple[str, ...]]
    warmup_batches: int
    window: int
    num_batches: int = 0

    def __post_init__(self, names: tuple[str, ...]) -> None:
        self._series = {name: Series(self.window) for name in names}

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def add(self, metrics: Metrics) -> None:
        """Those of the next batch."""
        self.num_batches += 1
        if self.num_batches > self.warmup_batches:
            for name, series in self._series.items():
                series.add(figure(name, metrics))


def figure(name: str, metrics: Metrics) -> float | None:
    """A batch's figure ``name``: a metric, or what is made of several; None if one is missing.

    ``no_signal`` is the share of the finished groups that were rejected or have equal rewards,
    ``clip_fraction`` the share of the trained tokens that are clipped on either side.
    """
    if name == "clip_fraction":
        low, high = metrics.get("policy/clip_low"), metrics.get("policy/clip_high")
        return None if low is None or high is None else low + high
    if name == "no_signal":
        flat, groups = metrics.get("reward/flat_groups"), metrics.get("batch/groups")
        rejected = metrics.get("batch/groups_rejected")
        if flat is None or groups is None or rejected is None or groups + rejected == 0:
            return None
        return (flat * groups + rejected) / (groups + rejected)
    return metrics.get(name)
