"""Equations (12) and (13), and advice, against batches that were computed by hand."""

from __future__ import annotations

import pytest

from easyrl.timeline.advice import MORE_INFERENCE, MORE_TRAINING, advice, replay_batch
from easyrl.timeline.spans import BatchSpans, Span
from easyrl.timeline.startup import most_at_once, startup_times
from tests.easyrl.timeline.made_spans import batch, phases


def group(start_s: float, end_s: float) -> Span:
    return Span("producer 0", "group", start_s, end_s)


def test_equations_12_and_13() -> None:
    groups = [group(0, 3), group(0, 5), group(5, 6), group(5.5, 9.5)]  # two at a time
    times = startup_times(groups, 2)
    assert times is not None
    assert times.sync_s == 5 + 4 and times.async_s == 3 and times.ratio == 3
    assert times.first_group_s == 3 and times.last_group_s == 9.5
    assert most_at_once(groups) == 2
    assert startup_times([], 2) is None
    with pytest.raises(ValueError, match="has to be positive"):
        startup_times(groups, 0)


def made(num_groups: int, places: int, response_s: float, each_s: float) -> BatchSpans:
    """Groups of equal length through ``places``, trained one by one as they come; 1 s behind it."""
    groups = [
        group((i // places) * response_s, (i // places + 1) * response_s) for i in range(num_groups)
    ]
    now_s, spans = 0.0, phases(("begin", 0.0))
    for each in groups:
        spans += phases(("wait", max(each.end_s - now_s, 0.0)), start_s=now_s)
        now_s = max(now_s, each.end_s)
        spans += phases(("train", each_s), start_s=now_s)
        now_s += each_s
    spans += phases(("step", 1.0), start_s=now_s)
    return batch([*spans, *groups], now_s + 1.0)


@pytest.mark.parametrize(("places", "each_s"), [(2, 0.1), (2, 1.0), (4, 0.5), (8, 2.0)])
@pytest.mark.parametrize("change", [MORE_TRAINING, MORE_INFERENCE])
def test_the_gain_is_that_of_a_batch_that_has_taken_the_advice(places, each_s, change) -> None:
    before = made(8, places, 2.0, each_s)
    taken = (
        made(8, places, 2.0, each_s / 2)
        if change == MORE_TRAINING
        else made(8, 2 * places, 2.0, each_s)
    )
    replayed = replay_batch(before, synchronous=False)
    assert replayed is not None
    assert replayed.as_it_was_s == pytest.approx(before.end_s)
    assert replayed.gains[change] == pytest.approx(1 - taken.end_s / before.end_s)


def test_advice_names_what_the_batch_is_bound_by() -> None:
    slow_trainer = advice([made(8, 8, 2.0, 2.0)], synchronous=False)
    assert slow_trainer.startswith("training-bound: twice the training devices would save 42%")
    slow_inference = advice([made(8, 1, 2.0, 0.1)], synchronous=False)
    assert slow_inference.startswith("inference-bound") and slow_inference.endswith(
        "46%"
    )  # 17.1 s, 9.2 s


def test_a_synchronous_run_trains_behind_the_last_group() -> None:
    spans = [
        *phases(("begin", 0.0), ("wait", 4.0), ("train", 4.0), ("step", 1.0)),
        group(0, 2),
        group(2, 4),
    ]
    replayed = replay_batch(batch(spans, 9.0), synchronous=True)
    assert replayed is not None
    assert replayed.as_it_was_s == 9.0 and replayed.more_training_s == 7.0
    assert replayed.more_inference_s == 7.0  # both arrive at 2


def test_without_trained_groups_there_is_nothing_to_advise() -> None:
    assert replay_batch(batch(phases(("begin", 1.0)), 1.0), synchronous=False) is None
    assert "nothing to advise" in advice([batch([], 1.0)], synchronous=False)
