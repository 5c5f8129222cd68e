"""The best division of a number of devices between inference and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from easyrl.simulation.pipeline import simulate
from easyrl.simulation.setting import Outcome, Setting

MOST_SPLITS = 24  # simulated of one number of devices


class Split(NamedTuple):
    """A setting and what comes of it."""

    setting: Setting
    outcome: Outcome
    fits: bool | None  # in a rank's memory; None: not known


def splits_of(
    devices: int,
    setting: Setting,
    *,
    fits: Callable[[int], bool | None] = lambda ranks: None,
    num_draws: int = 2,
) -> list[Split]:
    """Divisions of ``devices``, the fastest first; those that do not fit last.

    ``fits``: whether so many ranks have the memory. Raises ``ValueError`` if they are too few for
    one endpoint and one rank.
    """
    found = []
    for endpoints, ranks in _divisions(devices, setting):
        own = replace(setting, endpoints=endpoints, ranks=ranks)
        found.append(Split(own, simulate(own, num_draws=num_draws), fits(ranks)))
    if not found:
        least = setting.devices_per_endpoint + setting.devices_per_rank
        raise ValueError(f"--devices: {devices} are too few; an endpoint and a rank take {least}")
    return sorted(found, key=lambda split: (split.fits is False, split.outcome.step_s))


def _divisions(devices: int, setting: Setting) -> Iterator[tuple[int, int]]:
    """Endpoints and ranks: each that uses all devices, or as many as are worth a simulation."""
    most = (devices - setting.devices_per_rank) // setting.devices_per_endpoint
    numbers = range(1, most + 1)
    stride = max(len(numbers) // MOST_SPLITS, 1)
    for endpoints in numbers[::stride]:
        ranks = (devices - endpoints * setting.devices_per_endpoint) // setting.devices_per_rank
        ranks = min(ranks, setting.batch_size)  # a rank without a group has nothing to do
        if ranks >= 1:
            yield endpoints, ranks
