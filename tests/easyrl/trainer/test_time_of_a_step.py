"""Where the trainer's thread spends a step: phases that add up to the time between reports."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.easyrl.trainer.fake_parts import (
    FakeEngine,
    FakeEvaluation,
    FakeLedger,
    FakeStream,
    FakeSync,
    make_trainer,
)

# seconds that each part of a step sleeps
SLEEPS = {"train": 0.2, "step": 0.06, "sync": 0.08, "ledger": 0.05, "save": 0.03, "evaluation": 0.1}


class SlowEngine(FakeEngine):
    def forward_backward(self, micro_batches: Any) -> Any:
        time.sleep(SLEEPS["train"])
        return super().forward_backward(micro_batches)

    def optimizer_step(self, *denominators: float) -> Any:
        time.sleep(SLEEPS["step"])
        return super().optimizer_step(*denominators)


class SlowSync(FakeSync):
    def publish(self, version: Any, meanwhile: Any, *, canary_follows: bool = False) -> Any:
        time.sleep(SLEEPS["sync"])
        return super().publish(version, meanwhile, canary_follows=canary_follows)


class SlowLedger(FakeLedger):
    def close_batch(self, account: Any) -> None:
        time.sleep(SLEEPS["ledger"])
        super().close_batch(account)

    def save_if_due(self, progress: Any) -> None:
        time.sleep(SLEEPS["save"])


class WhenReported:
    def __init__(self) -> None:
        self.at_s: list[float] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.at_s.append(time.monotonic())

    def close(self) -> None: ...


def test_phases_add_up_to_the_time_from_report_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "wait_s", 0.0)

    def evaluate(step: int, version: Any) -> dict[str, float]:
        time.sleep(SLEEPS["evaluation"])
        return {"eval/accuracy": 0.5}

    events: list[str] = []
    when = WhenReported()
    trainer, reported = make_trainer(
        events,
        num_batches=4,
        engine=SlowEngine(events),
        weight_sync=SlowSync(events),
        ledger=SlowLedger(events),
        evaluation=FakeEvaluation(evaluate),
        trackers=[when],
    )
    trainer.fit()
    steps = [
        (at_s, metrics)
        for at_s, (_, metrics) in zip(when.at_s, reported, strict=True)
        if "time/step_s" in metrics
    ]
    assert len(steps) == 4
    for (before_s, _), (at_s, metrics) in zip(steps[:-1], steps[1:], strict=True):
        spent = {
            name.removeprefix("time/phase_").removesuffix("_s"): seconds
            for name, seconds in metrics.items()
            if name.startswith("time/phase_")
        }
        assert sum(spent.values()) == pytest.approx(at_s - before_s, rel=0.005, abs=0.01)
        assert min(spent.values()) >= 0.0
        # two rows of a batch; the last report waits for the last weights' evaluation too
        times = {"train": 2, "evaluation": 2 if metrics is steps[-1][1] else 1}
        for name, seconds in SLEEPS.items():
            slept = times.get(name, 1) * seconds
            assert slept <= spent[name] < slept + 0.1, name
        assert spent["other"] + spent["report"] + spent["check"] + spent["ranks"] < 0.1
