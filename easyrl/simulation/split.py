"""The best division of a number of devices between inference and training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from easyrl.simulation.line_search import search_beside, stride_of
from easyrl.simulation.pipeline import simulate
from easyrl.simulation.setting import Outcome, Setting

NUM_DRAWS = 2  # batches of each division ...
LARGE = 1000  # prompts: ... of a batch with more one, whose lengths are as those of any other


def num_draws_of(batch_size: int) -> int:
    """Batches that are drawn of each division."""
    return NUM_DRAWS if batch_size <= LARGE else 1


class Split(NamedTuple):
    """A setting and what comes of it."""

    setting: Setting
    outcome: Outcome
    fits: bool | None  # in a rank's memory; None: not known

    @property
    def cost(self) -> tuple[bool, float]:
        return self.fits is False, self.outcome.step_s


def splits_of(
    devices: int,
    setting: Setting,
    *,
    fits: Callable[[int], bool | None] = lambda ranks: None,
) -> list[Split]:
    """Divisions of ``devices``, the fastest first; those that do not fit last.

    All that use the devices, where those are few; else a grid of them and what is beside its best.
    ``fits``: whether so many ranks have the memory. Raises ``ValueError`` if they are too few for
    one endpoint and one rank.
    """
    most = (devices - setting.devices_per_rank) // setting.devices_per_endpoint
    if most < 1:
        least = setting.devices_per_endpoint + setting.devices_per_rank
        raise ValueError(f"--devices: {devices} are too few; an endpoint and a rank take {least}")
    num_draws = num_draws_of(setting.batch_size)
    found: dict[int, Split] = {}

    def tried(endpoints: int) -> Split:
        if endpoints not in found:
            left = devices - endpoints * setting.devices_per_endpoint
            # a rank without a group has nothing to do
            ranks = min(left // setting.devices_per_rank, setting.batch_size)
            own = replace(setting, endpoints=endpoints, ranks=ranks)
            found[endpoints] = Split(own, simulate(own, num_draws=num_draws), fits(ranks))
        return found[endpoints]

    stride = stride_of(most)
    best = min(range(1, most + 1, stride), key=lambda number: tried(number).cost)
    search_beside(best, stride, lambda number: tried(number).cost if 1 <= number <= most else None)
    return sorted(found.values(), key=lambda split: split.cost)
