"""What was planted in a timeline is found again, and divisions of devices are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from easyrl.simulation.calibrate import calibrate
from easyrl.simulation.line_search import search_beside, stride_of
from easyrl.simulation.pipeline import simulate
from easyrl.simulation.setting import Lengths
from easyrl.simulation.split import splits_of
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.simulation.test_pipeline import SETTING
from tests.easyrl.timeline.made_spans import phases

A, B, C, D = 0.01, 0.0005, 0.001, 0.03  # of a token, of each beside it, of a prompt's token, fixed


def made_batch(number: int) -> list[BatchSpans]:
    """Two endpoints with as many requests at a time as they have for their whole time."""
    spans: list[Span] = []
    start_s = 100.0 * number
    for endpoint, beside in enumerate((4, 8)):
        tokens, prompt = 50 + 10 * endpoint + number, 20 + 30 * number
        seconds = tokens * (A + B * beside) + C * prompt + D
        args = {"response_tokens": tokens, "prompt_tokens": prompt}
        for _ in range(beside):
            sent_s = start_s + 0.25
            spans.append(
                Span(f"endpoint http://{endpoint}", "request", sent_s, sent_s + seconds, args)
            )
    for index in range(3):  # 4 responses each
        spans.append(Span("producer 0", "group", start_s + 0.25, start_s + 1.0, {"index": index}))
    own = phases(("begin", 0.25), ("wait", 1.0), start_s=start_s)
    own.append(Span("rank 0", "train", start_s + 1.25, start_s + 2.25, {"num_tokens": 500}))
    own += phases(("pack", 0.3), ("step", 0.45), start_s=start_s + 2.25)
    return [BatchSpans(number, 0, start_s, start_s + 3.0, [*spans, *own])]


def test_planted_rates_are_found() -> None:
    batches = [made_batch(number) for number in range(4)]
    found = calibrate(batches, places=8, batch_size=3, group_size=4, mode="async")
    rates, setting = found.setting.rates, found.setting
    assert rates.decode_step_s == pytest.approx(A, rel=1e-6)
    assert rates.decode_each_s == pytest.approx(B, rel=1e-6)
    assert rates.prefill_s == pytest.approx(C, rel=1e-6)
    assert rates.request_s == pytest.approx(D, rel=1e-6)
    assert rates.train_token_s == pytest.approx(1 / 500)
    assert rates.train_group_s == pytest.approx(0.1)
    assert rates.border_s == pytest.approx(0.25 + 0.75)
    assert (setting.endpoints, setting.ranks, found.step_s) == (2, 1, pytest.approx(3.0))
    assert 0 < rates.trained_share <= 1


def test_too_little_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="has 12 requests and 20 are needed; train a few"):
        calibrate([made_batch(0)], places=8, batch_size=3, group_size=4, mode="async")
    untrained = [
        [
            replace_spans(each, [s for s in each.spans if s.name != "train"])
            for each in made_batch(n)
        ]
        for n in range(3)
    ]
    with pytest.raises(ValueError, match="no trained micro-batch"):
        calibrate(untrained, places=8, batch_size=3, group_size=4, mode="async")


def replace_spans(batch: BatchSpans, spans: list[Span]) -> BatchSpans:
    return BatchSpans(batch.batch, batch.rank, batch.start_s, batch.end_s, spans)


def test_the_best_division_is_first_and_uses_no_more_than_there_is() -> None:
    slow_training = replace(SETTING, batch_size=16, rates=replace(SETTING.rates, train_group_s=1.0))
    found = splits_of(8, slow_training)
    assert all(split.setting.devices <= 8 for split in found)
    assert found[0].outcome.step_s == min(split.outcome.step_s for split in found)
    assert found[0].setting.ranks > found[0].setting.endpoints
    one = simulate(found[0].setting, num_draws=2)
    assert one.step_s == found[0].outcome.step_s


@pytest.mark.parametrize("devices", [64, 65])
def test_of_few_devices_all_divisions_are_tried(devices: int) -> None:
    setting = replace(SETTING, batch_size=64)
    tried = {split.setting.endpoints for split in splits_of(devices, setting)}
    assert tried == set(range(1, devices))


@pytest.mark.parametrize("best", [1, 2, 37, 100, 163, 199])
def test_of_many_numbers_the_best_is_found(best: int) -> None:
    asked = []

    def cost_of(number: int) -> int | None:
        asked.append(number)
        return abs(number - best) if 1 <= number <= 199 else None

    stride = stride_of(199)
    start = min(range(1, 200, stride), key=lambda number: abs(number - best))
    assert search_beside(start, stride, cost_of) == best
    assert {best - 1, best, best + 1} <= set(asked) and len(asked) == len(set(asked)) < 20


def test_of_many_devices_what_is_beside_the_best_is_tried() -> None:
    setting = replace(SETTING, batch_size=300, places=2, lengths=Lengths(mean=100, sigma=0.5))
    tried = splits_of(200, setting)
    numbers = {split.setting.endpoints for split in tried}
    best = tried[0].setting.endpoints
    assert {best - 1, best + 1} - {0, 200} <= numbers and len(numbers) < 60


def test_prompts_are_trained_with_each_response_where_they_are_not_shared() -> None:
    """A group of three more responses has three prompts more."""
    batches = [made_batch(number) for number in range(4)]
    tokens = sum(  # of all requests of a batch, each with its prompt
        int(s.args["response_tokens"]) + int(s.args["prompt_tokens"])
        for s in batches[0][0].spans
        if s.name == "request"
    )
    assert tokens == 4 * (50 + 20) + 8 * (60 + 20)
    settings = [
        calibrate(
            batches, places=8, batch_size=3, group_size=4, mode="async", shares_prompts=shares
        ).setting
        for shares in (True, False)
    ]
    shared, unshared = settings
    assert unshared.rates.trained_share < shared.rates.trained_share
    group = [60] * 4
    trained = [s.packed_tokens(group) * s.rates.trained_share for s in settings]
    assert trained[0] == pytest.approx(trained[1], rel=0.05)  # as it was
    more = [s.packed_tokens([60] * 7) * s.rates.trained_share for s in settings]
    assert more[1] - more[0] > 2 * abs(trained[1] - trained[0])


def test_steps_of_a_batch_are_told_from_its_border() -> None:
    """Of two optimizer steps the first is not the border's."""
    batches = [made_batch(number) for number in range(4)]
    for (each,) in batches:
        start_s = each.start_s
        kept = [s for s in each.spans if not (s.lane == "rank 0" and s.start_s >= start_s + 1.25)]
        kept.append(Span("rank 0", "train", start_s + 1.25, start_s + 1.75, {"num_tokens": 250}))
        kept += phases(("check", 0.05), ("step", 0.2), start_s=start_s + 1.75)
        kept.append(Span("rank 0", "train", start_s + 2.0, start_s + 2.5, {"num_tokens": 250}))
        kept += phases(("check", 0.1), ("step", 0.4), start_s=start_s + 2.5)
        each.spans[:] = kept
    setting = calibrate(batches, places=8, batch_size=4, group_size=3, mode="async").setting
    assert setting.updates == 2
    assert setting.rates.update_s == pytest.approx(0.25)
    assert setting.rates.border_s == pytest.approx(0.25 + 0.5)


def test_what_does_not_fit_is_last() -> None:
    found = splits_of(6, SETTING, fits=lambda ranks: ranks >= 4)
    assert [split.fits for split in found] == sorted((s.fits for s in found), reverse=True)
    assert found[0].setting.ranks >= 4


def test_too_few_devices_are_refused() -> None:
    setting = replace(SETTING, devices_per_endpoint=4, devices_per_rank=4)
    with pytest.raises(ValueError, match="7 are too few; an endpoint and a rank take 8"):
        splits_of(7, setting)
