"""``benchmarks.evaluation``: what it counts and asks for, and that it can see what it is about."""

from __future__ import annotations

import pytest

from benchmarks import evaluation as benchmark
from benchmarks.evaluation import verdicts
from easyrl.build import evaluation
from easyrl.timeline.spans import EVALUATION, REQUEST, Span


def spans(name: str, *times: tuple[float, float]) -> list[Span]:
    return [Span("endpoint http://a:1", name, start_s, end_s) for start_s, end_s in times]


@pytest.mark.parametrize(
    "began, share", [([4.0, 6.0, 8.0, 9.0], 0.5), ([7.0, 8.0], 0.0), ([1.0, 6.9], 1.0)]
)
def test_in_the_tail_is_what_begins_before_the_batch_s_last_response(began, share):
    requests = spans(REQUEST, (0.0, 3.0), (0.0, 7.0), (1.0, 5.0))
    evaluated = spans(EVALUATION, *((start_s, start_s + 9.0) for start_s in began))
    assert benchmark.share_in_tail([*evaluated, *requests]) == share


def test_an_evaluation_has_room_beside_open_groups_of_its_workloads():
    """Else neither row would show what such room costs and gains."""
    places = evaluation.SHARE * benchmark.MAX_INFLIGHT
    assert places >= 2 * benchmark.NUM_GENERATIONS + 1


@pytest.mark.parametrize("share, fewest", [(0.0, 0), (0.125, 1), (1.0, 1)])
def test_a_share_of_nothing_is_no_room_at_all(share, fewest, monkeypatch):
    monkeypatch.setattr(evaluation, "SHARE", evaluation.SHARE)
    monkeypatch.setattr(evaluation, "FEWEST", evaluation.FEWEST)
    trained = []
    monkeypatch.setattr("runpy.run_module", lambda *_, **__: trained.append(True))
    exec(benchmark.train_with_share(share), {})
    assert (evaluation.SHARE, evaluation.FEWEST, trained) == (share, fewest, [True])


def test_beyond_the_idle_time_the_bound_counts() -> None:
    kept = {"allowed_s": 2.3, "within_allowed": True, "within_before": None}
    assert verdicts(added_s=2.2, before_s=4.0, bound_s=2.0) == kept
    assert verdicts(added_s=2.4, before_s=9.0, bound_s=2.0) == kept | {"within_allowed": False}


def test_where_the_idle_time_suffices_before_counts() -> None:
    kept = {"allowed_s": 0.0, "within_allowed": None, "within_before": True}
    assert verdicts(added_s=0.7, before_s=4.0, bound_s=0.0) == kept
    assert verdicts(added_s=-0.1, before_s=4.0, bound_s=0.0) == kept
    assert verdicts(added_s=0.9, before_s=4.0, bound_s=0.0) == kept | {"within_before": False}
