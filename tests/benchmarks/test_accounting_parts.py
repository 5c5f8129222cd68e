"""The parts that ``benchmarks.accounting`` holds up exist, and every cause has one."""

from __future__ import annotations

import inspect

import pytest

from benchmarks.accounting import _of_modes
from benchmarks.parts.accounting.planted import PARTS
from easyrl.metrics.step_progress import DOES
from easyrl.timeline.accounting import (
    BETWEEN,
    BORDER,
    ENVIRONMENTS,
    FAILING,
    FIRST_GROUP,
    GENERATING,
    STARVED,
    TAIL,
    TRAINING,
)

# what is held up of ranks, or answers late, in the accounts of endpoints; without environments and
# failures; once in a run
NOT_OF_A_PART = {GENERATING, BORDER, TRAINING, ENVIRONMENTS, FAILING, "probe", "evaluation"}
OF_ENDPOINTS = {GENERATING, TAIL, BORDER, BETWEEN, ENVIRONMENTS, TRAINING, FAILING}
OF_ENDPOINTS |= {"push", "proof", "canary", "probe", "evaluation"}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_held_up_is_there_and_awaited_as_it_is_called(name: str) -> None:
    part = PARTS[name]
    assert inspect.iscoroutinefunction(getattr(part.owner, part.method)) == part.is_async


def test_every_cause_has_a_part() -> None:
    planted = {lane: set() for lane in ("rank", "endpoint")}
    for part in PARTS.values():
        planted[part.lane] |= set(part.causes)
    assert planted["endpoint"] == OF_ENDPOINTS - NOT_OF_A_PART
    of_ranks = set(DOES) - {"wait", "other"} | {FIRST_GROUP, STARVED}
    assert planted["rank"] == of_ranks


def test_each_part_is_run_in_the_modes_that_have_it() -> None:
    found = list(_of_modes(("sync", "async"), ""))
    assert {name for mode, name in found if mode == "async"} == set(PARTS)
    only_async = {"first response", "later responses", "look-ahead"}
    assert {name for mode, name in found if mode == "sync"} == set(PARTS) - only_async
    chosen = [name for _, name in _of_modes(("async",), "push,tail")]
    assert chosen == ["tail", "push", "push, at the trainer"]
