"""Processors that the trainer lends while it waits: taken to compute, given back to wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from easyrl.engines.base import MetricSums
from easyrl.runtime.contention import Contention
from easyrl.runtime.shared_cores import SharedCores
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import MicroBatch, RolloutGroup, TrainedGroup
from easyrl.trainer.accumulation import Accumulator
from tests.easyrl.trainer.test_without_signal import OTHER, Drains, Engine, group, plain_accumulator
from tests.recipes import group_functions, run_settings


class RecordedCores(SharedCores):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def take(self) -> None:
        self.events.append("take")

    def rest(self) -> None:
        self.events.append("rest")


class RecordedDrains(Drains):
    def __init__(self, events: list[str]) -> None:
        super().__init__([group(0, OTHER), group(1, OTHER)], [group(2, OTHER)])
        self.events = events

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        self.events.append("wait")
        return super().drain_ready(max_tokens, idle)


class RecordedEngine(Engine):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        self.events.append("train")
        return super().forward_backward(rows)

    def finish_backwards(self) -> list[MetricSums]:
        self.events.append("finish")
        return super().finish_backwards()


class FailingEngine(RecordedEngine):
    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        raise OSError("no memory")


def new_accumulator(events: list[str], engine: Engine, max_tokens: int) -> Accumulator:
    stop = StopRequest(60.0)
    stop.close()
    functions = group_functions(None, run_settings(), max_tokens_per_micro_batch=max_tokens)
    return plain_accumulator(engine, functions, stop, max_tokens, cores=RecordedCores(events))


@pytest.mark.parametrize("max_tokens", [12, 100])
def test_taken_for_each_micro_batch_and_lent_for_each_wait(max_tokens: int) -> None:
    events: list[str] = []
    accumulator = new_accumulator(events, RecordedEngine(events), max_tokens)
    accumulator.accumulate(cast(Any, RecordedDrains(events)))
    held = False
    for event in events:
        held = {"take": True, "rest": False}.get(event, held)
        assert event in ("take", "rest") or held == (event != "wait"), events
    assert events.count("wait") == 3
    assert events.count("train") == (3 if max_tokens == 12 else 2)
    assert not held  # the producer's turn, and the weight sync's


def test_lent_where_training_fails() -> None:
    events: list[str] = []
    accumulator = new_accumulator(events, FailingEngine(events), 100)
    with pytest.raises(OSError, match="no memory"):
        accumulator.accumulate(cast(Any, RecordedDrains(events)))
    assert "take" in events and events[-1] == "rest"


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[SharedCores]:
    threads = torch.get_num_threads()
    shared = SharedCores(tmp_path / "cores", num_cores=3)
    # other test processes are no reason to compute with one thread
    shared._contention = Contention(now=lambda: (time.monotonic(), 0.0))
    yield shared
    shared.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("most", "rows_at_once", "wanted"), [(3, 2, 2), (2, 3, 3), (1, 3, 2), (3, 3, 3), (3, 1, 1)]
)
def test_one_row_more_is_asked_for_than_threads_are_lent(
    cores: SharedCores, most: int, rows_at_once: int, wanted: int
) -> None:
    """No more than there is memory for, and one where rows run one by one."""
    asked: list[int] = []
    plain = group_functions(None, run_settings(), max_tokens_per_micro_batch=100)

    def pack(groups: Sequence[TrainedGroup], /, *, min_rows: int = 1) -> list[MicroBatch]:
        asked.append(min_rows)
        return plain.pack(groups)

    cores._most = most
    accumulator = replace(
        new_accumulator([], Engine(), 100),
        cores=cores,
        rows_at_once=rows_at_once,
        functions=replace(plain, pack=pack),
    )
    accumulator.accumulate(cast(Any, RecordedDrains([])))
    assert asked == [wanted, wanted]


class LendingEngine(Engine):
    """While it trains for the first time a server ends, and leaves its core."""

    def __init__(self, cores: SharedCores) -> None:
        super().__init__()
        self.num_rows: list[int] = []
        self._cores = cores

    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        self.num_rows.append(len(rows))
        self._cores._most = 2
        return super().forward_backward(rows)


def test_as_many_rows_are_trained_at_a_time_as_threads_are_lent_then(cores: SharedCores) -> None:
    cores._most = 1
    engine = LendingEngine(cores)
    plain = group_functions(None, run_settings(), max_tokens_per_micro_batch=100)

    def pack(groups: Sequence[TrainedGroup], /, *, min_rows: int = 1) -> list[MicroBatch]:
        return [row for group in groups for row in plain.pack([group])]

    accumulator = replace(
        new_accumulator([], engine, 100),
        cores=cores,
        rows_at_once=3,
        functions=replace(plain, pack=pack),
    )
    groups = [group(index, OTHER) for index in range(5)]
    totals = accumulator.accumulate(cast(Any, Drains(groups[:4], groups[4:])))
    assert engine.num_rows == [1, 2, 1, 1]
    assert totals.num_micro_batches == 5 and sorted(engine.prompts) == [*range(5)]


def test_one_row_where_cores_are_not_shared() -> None:
    accumulator = replace(new_accumulator([], Engine(), 100), cores=SharedCores(), rows_at_once=4)
    assert (accumulator._least_rows(), accumulator._rows_now()) == (1, 4)  # a pipeline's
