"""Runs of behaviours that have to meet, without a healthy endpoint in which they would not show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from benchmarks.parts.hostile.behaviour import EndpointBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.plan import RunPlan

FIRST_NUMBER = 1000  # of a run; those of drawn plans are below
MIXTURES = (
    # whoever refuses is the only one that is up, as often as the other restarts
    ("refuse-prompts-of-the-dataset", "restarts-for-seconds"),
)
MOST_ENDPOINTS = max(len(names) for names in MIXTURES)


def plan_mixtures(seed: int) -> list[RunPlan]:
    """A run of each, with these endpoints only."""
    return [
        RunPlan(FIRST_NUMBER + number, seed, _behaviours(names), (), beside_healthy=False)
        for number, names in enumerate(MIXTURES)
    ]


def _behaviours(names: Sequence[str]) -> tuple[EndpointBehaviour, ...]:
    return tuple(cast(EndpointBehaviour, BEHAVIOURS[name]) for name in names)
