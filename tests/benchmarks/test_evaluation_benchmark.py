"""The evaluation's benchmark: what its verdicts ask for."""

from __future__ import annotations

from benchmarks.evaluation import verdicts


def test_beyond_the_idle_time_the_bound_counts() -> None:
    kept = {"allowed_s": 2.3, "within_allowed": True, "within_before": None}
    assert verdicts(added_s=2.2, before_s=4.0, bound_s=2.0) == kept
    assert verdicts(added_s=2.4, before_s=9.0, bound_s=2.0) == kept | {"within_allowed": False}


def test_where_the_idle_time_suffices_before_counts() -> None:
    kept = {"allowed_s": 0.0, "within_allowed": None, "within_before": True}
    assert verdicts(added_s=0.7, before_s=4.0, bound_s=0.0) == kept
    assert verdicts(added_s=-0.1, before_s=4.0, bound_s=0.0) == kept
    assert verdicts(added_s=0.9, before_s=4.0, bound_s=0.0) == kept | {"within_before": False}
