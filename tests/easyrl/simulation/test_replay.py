"""A run's batches are simulated one by one, and compared as they are measured."""

from __future__ import annotations

from statistics import mean, median

import msgspec
import pytest

from easyrl.simulation.calibrate import calibrate
from easyrl.simulation.pipeline import simulate
from easyrl.simulation.replay import lengths_of, replayed
from easyrl.timeline.spans import BatchSpans
from tests.easyrl.simulation.test_advice import TOKENS, made


def with_less_signal(share: float) -> BatchSpans:
    """All responses come at once; that share of the tokens is trained, 0.3 s for a whole group."""
    batch = made(24, 0.3 * share)
    spans = [
        msgspec.structs.replace(span, args={"num_tokens": round(share * (TOKENS + 10))})
        if span.name == "train"
        else span
        for span in batch.spans
    ]
    return msgspec.structs.replace(batch, spans=spans)


def test_batches_that_train_unequal_shares_are_compared_each_with_itself() -> None:
    batches = [[with_less_signal(share)] for share in (1.0, 0.2, 0.2, 0.2, 0.2)]
    setting = calibrate(batches, places=24, batch_size=24, group_size=1, mode="async").setting
    found = replayed(batches, setting)
    # 2 s until all are there, training, 1 s behind it
    expected = [2 + 24 * 0.3 + 1, *[2 + 24 * 0.06 + 1] * 4]
    assert [each.measured_s for each in found] == pytest.approx(expected)
    assert [each.simulated_s for each in found] == pytest.approx(expected, rel=0.01)
    drawn = simulate(setting).step_s
    assert drawn == pytest.approx(mean(expected), rel=0.01)  # of all together it is the mean ...
    assert drawn > 1.2 * median(expected)  # ... and no median


def test_batches_without_a_request_are_left_out() -> None:
    batch = made(24, 0.3)
    empty = msgspec.structs.replace(batch, spans=[s for s in batch.spans if s.name != "request"])
    setting = calibrate([[batch]], places=24, batch_size=24, group_size=1, mode="async").setting
    assert len(replayed([[batch], [empty]], setting)) == 1
    assert lengths_of([batch], 12) == [[TOKENS] * 12] * 2
