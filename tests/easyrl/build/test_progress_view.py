"""What the console is told of an open step, of parts that stand still meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from easyrl.build.progress import ProgressView
from easyrl.dataloaders.producer.batch_progress import BatchProgress
from easyrl.metrics.step_progress import StepProgress
from easyrl.runtime.busy_time import BusyTime
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.schema import Progress


def endpoint(url: str, num_inflight: int, *, is_up: bool = True) -> Any:
    return SimpleNamespace(url=url, num_inflight=num_inflight, is_up=is_up)


def view(clock: PhaseClock, batch: BatchProgress | None, **settings: Any) -> ProgressView:
    of_run: dict[str, Any] = {
        "progress": Progress(reported_step=4),
        "batches": SimpleNamespace(progress=batch),
        "checkpoints": SimpleNamespace(is_writing=False),
        **settings,
    }
    return ProgressView(clock, **of_run)


def inference(*endpoints: Any, in_outage: bool = False) -> Any:
    pool = SimpleNamespace(endpoints=endpoints, in_outage=in_outage)
    return SimpleNamespace(pool=pool, rewards_busy=BusyTime())


def test_a_step_on_rollouts():
    clock = PhaseClock()
    parts = inference(endpoint("http://a", 3), endpoint("http://b", 4, is_up=False))
    running = SimpleNamespace(answered=(2, 9))
    look = view(
        clock,
        BatchProgress(8, 5, 2),
        inference=parts,
        evaluation=running,
        updates_per_batch=2,
    )
    with clock.phase("wait"), parts.rewards_busy.task(), parts.rewards_busy.task():
        assert look() == StepProgress(
            step=6,
            does="waits for groups",
            size=8,
            arrived=5,
            trained=2,
            in_flight=7,
            scoring=2,
            evaluated=(2, 9),
            endpoints_down=("http://b",),
        )
    with clock.phase("step"):
        assert (look().does, look().scoring) == ("takes the optimizer step", 0)


def test_the_innermost_phase_is_told():
    clock = PhaseClock()
    look = view(clock, BatchProgress(8, 5, 2), inference=inference())
    with clock.phase("pack"):
        with clock.phase("train", num_rows=2):
            assert look().does == "trains"
        assert look().does == "packs micro-batches"


def test_in_an_outage_it_is_endpoints_that_are_waited_for():
    clock = PhaseClock()
    down = inference(endpoint("http://a", 0, is_up=False), in_outage=True)
    with clock.phase("sync"):
        seen = view(clock, None, inference=down)()
    assert (seen.does, seen.endpoints_down) == ("waits for an endpoint", ("http://a",))
    assert seen.size is None and seen.counts() == "in flight 0"


def test_a_run_on_records_has_no_requests():
    checkpoints = SimpleNamespace(is_writing=True)
    looks = view(PhaseClock(), BatchProgress(8, 8, 3), checkpoints=checkpoints)
    assert looks().counts() == "records 8/8  trained 3"
    assert looks().notes() == "writes a checkpoint"


def test_before_the_first_report_it_is_step_0():
    assert view(PhaseClock(), None, progress=Progress(), updates_per_batch=2)().step == 0
