"""By how much the causes of a lane grow in those batches of a run that are held up."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.parts.accounting.delays import is_held_up
from easyrl.timeline.accounting import (
    FIRST_GROUP,
    IDLE,
    STARVED,
    LaneAccount,
    account,
)
from easyrl.timeline.spans import BatchSpans

# What a delay may use up, as another would have been waited for
WAITS = IDLE | {FIRST_GROUP, STARVED}


class Growth(NamedTuple):
    """Seconds a batch, of one lane; medians of the differences of each batch."""

    own_s: float  # of the causes that a delay has
    others: dict[str, float]
    wall_s: float

    @property
    def most_other(self) -> tuple[str, float]:
        """The other cause that grew most."""
        grown = {"none": 0.0, **self.others}
        return max(grown.items(), key=lambda item: item[1])

    def off(self, planted_s: float) -> float:
        """By how much more the batch took than a delay of ``planted_s`` says, seconds.

        A delay beside which something was waited for makes the batch that much less longer.
        """
        hidden_s = sum(max(-s, 0.0) for cause, s in self.others.items() if cause in WAITS)
        return self.wall_s - max(planted_s - hidden_s, 0.0)


def growth(kind: str, causes: Sequence[str], batches: Sequence[Sequence[BatchSpans]]) -> Growth:
    """Of the lane of ``kind`` ("rank", "endpoint") whose ``causes`` grow most.

    ``batches`` follow each other; each that ``is_held_up`` is compared with the one before it.
    """
    lanes: dict[str, dict[int, LaneAccount]] = {}
    for of_ranks in batches:
        for each in account(of_ranks):
            if each.lane.startswith(f"{kind} "):
                lanes.setdefault(each.lane, {})[each.batch] = each
    found = [_of_lane(causes, lanes[lane]) for lane in sorted(lanes)]
    return max(found, key=lambda each: each.own_s)


def _of_lane(causes: Sequence[str], accounts: Mapping[int, LaneAccount]) -> Growth:
    pairs = [
        (accounts[number - 1], accounts[number])
        for number in accounts
        if is_held_up(number) and number - 1 in accounts
    ]

    def grown(*names: str) -> float:
        return statistics.median(
            sum(new.causes.get(name, 0.0) - old.causes.get(name, 0.0) for name in names)
            for old, new in pairs
        )

    others = {name for old, new in pairs for name in old.causes | new.causes} - set(causes)
    return Growth(
        own_s=grown(*causes),
        others={name: grown(name) for name in sorted(others)},
        wall_s=statistics.median(new.wall_s - old.wall_s for old, new in pairs),
    )
