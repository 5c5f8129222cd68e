"""Processors that the trainer lends while it waits: taken to compute, given back to wait."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from easyrl.engines.base import MetricSums
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import Accumulator
from tests.easyrl.trainer.test_without_signal import OTHER, group
from tests.recipes import group_functions, run_settings


class RecordedCores(SharedCores):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def take(self) -> None:
        self.events.append("take")

    def rest(self) -> None:
        self.events.append("rest")


class Parts:
    """Groups that come in two drains and an engine; both say what they do."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Any] = frozenset()
    discarded: frozenset[Any] = frozenset()
    device = torch.device("cpu")
    lockstep = False
    has_frozen_models = False

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.drains = [[group(0, OTHER), group(1, OTHER)], [group(2, OTHER)]]

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        self.events.append("wait")
        return self.drains.pop(0) if self.drains else []

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return rows

    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        self.events.append("train")
        tokens = float(sum(row.num_loss_tokens for row in rows))
        return [MetricSums({"num_loss_tokens": tokens, "loss_sum": 0.0})]


@pytest.mark.parametrize("max_tokens", [12, 100])
def test_taken_for_each_micro_batch_and_lent_for_each_wait(max_tokens: int) -> None:
    events: list[str] = []
    parts, stop = Parts(events), StopRequest(60.0)
    accumulator = Accumulator(
        engine=cast(Any, parts),
        collectives=Collectives(Ranks.data_parallel(0, 1)),
        functions=group_functions(None, run_settings(), max_tokens_per_micro_batch=max_tokens),
        stop=stop,
        is_interruption=lambda error: False,
        record=ignore,
        max_tokens=max_tokens,
        synchronous=False,
        cores=RecordedCores(events),
    )
    accumulator.accumulate(cast(Any, parts))
    stop.close()
    held = False
    for event in events:
        held = {"take": True, "rest": False}.get(event, held)
        assert event not in ("wait", "train") or held == (event == "train"), events
    assert events.count("wait") == 3
    assert events.count("train") == (3 if max_tokens == 12 else 2)
    assert not held  # the producer's turn, and the weight sync's
