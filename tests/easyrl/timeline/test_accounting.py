"""Causes of a lane are disjoint, add up to its time, and are what was running."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.timeline.accounting import LaneAccount, account, mean_shares
from easyrl.timeline.spans import Span
from tests.easyrl.timeline.made_spans import ENDPOINTS, TRAINER, A, B, batch, phases, requests


def accounts_of(spans, end_s=10.0) -> dict[str, LaneAccount]:
    return {each.lane: each for each in account([batch(spans, end_s)])}


def test_a_rank_waits_for_the_first_group_and_starves_later() -> None:
    causes = accounts_of(TRAINER)["rank 0"].causes
    expected = {"begin": 1, "first group": 2, "train": 5, "starved": 1, "step": 0.5, "sync": 0.5}
    assert causes == pytest.approx({**expected, "unexplained": 0})


def test_what_no_phase_covers_is_unexplained() -> None:
    spans = [*phases(("begin", 1), ("wait", 2)), *phases(("other", 1), ("train", 2), start_s=5)]
    found = accounts_of(spans)["rank 0"]
    assert found.unexplained_s == pytest.approx(2 + 1 + 2)  # a gap, "other", and the end


def test_an_endpoint_generates_has_a_tail_and_waits_for_the_trainer() -> None:
    causes = accounts_of([*TRAINER, *ENDPOINTS])
    assert causes[A].causes == pytest.approx(
        {
            "idle: border": 0.5,
            "generating": 3.5,  # to 4.0; the last request is sent at 5
            "idle: nothing sent": 1.0,
            "tail": 1.0,
            "idle: training": 3.5,  # to the end of the step, at 9.5
            "push": 0.3,
            "proof": 0.2,
        }
    )
    assert causes[B].causes == pytest.approx(
        {
            "idle: border": 0.5 + 0.5,  # before, and beside the other's push
            "generating": 6.5,  # one at a time, as many as ever
            "evaluation": 0.5,
            "idle: training": 2.0,
        }
    )


def test_an_endpoint_without_requests_while_an_environment_acts_waits_for_that() -> None:
    acting = [
        Span("environment game", "environment", 4.2, 4.5),
        Span("environment game", "environment", 4.4, 4.8),  # another episode's, beside it
        Span("environment game", "environment", 1.0, 1.5),  # while others generate
        Span("environment game", "tool add", 4.2, 4.3),
        Span("environment game", "episode", 0.5, 6.0),
    ]
    found = accounts_of([*TRAINER, *ENDPOINTS, *acting])
    assert set(found) == {"rank 0", A, B}
    causes = found[A].causes
    assert causes["idle: environments"] == pytest.approx(0.6)
    assert causes["idle: nothing sent"] == pytest.approx(0.4)
    assert causes["generating"] == pytest.approx(3.5)
    assert sum(causes.values()) == pytest.approx(10.0)


def test_a_probe_goes_before_the_push_inside_it_and_requests_before_all() -> None:
    spans = [
        *TRAINER,
        Span(A, "probe", 0.0, 2.0),
        Span(A, "push", 0.5, 1.0),
        *requests(A, (1.5, 3.0)),
        Span(A, "canary", 2.5, 4.0),
    ]
    causes = accounts_of(spans)[A].causes
    assert causes["probe"] == pytest.approx(1.5) and "push" not in causes
    assert causes["generating"] == pytest.approx(1.5) and "tail" not in causes
    assert causes["canary"] == pytest.approx(1.0)


def test_the_tail_begins_when_a_place_is_empty_and_nothing_more_comes() -> None:
    spans = [*TRAINER, *requests(A, (1.0, 5.0), (1.0, 6.0), (1.1, 7.0))]  # all at about once
    causes = accounts_of(spans)[A].causes
    assert causes["generating"] == pytest.approx(5.0 - 1.0)
    assert causes["tail"] == pytest.approx(7.0 - 5.0)


def test_no_tail_while_more_comes_or_all_places_are_taken() -> None:
    spans = [*TRAINER, *requests(A, (1.0, 3.0), (1.0, 6.0), (4.0, 7.0))]
    causes = accounts_of(spans)[A].causes
    assert causes["generating"] == pytest.approx(6.0 - 1.0)  # one from 3 to 4, and another comes
    assert causes["tail"] == pytest.approx(7.0 - 6.0)


def test_requests_that_fail_are_no_idle_time() -> None:
    spans = [*TRAINER, *requests(A, (1.0, 2.0), (4.0, 5.0), (6.0, 7.0))]
    spans += requests(A, (1.5, 2.5), (2.4, 3.5), name="failed request")
    found = accounts_of(spans)[A]
    causes = found.causes
    assert causes["failed"] == pytest.approx(4.0 - 2.0)  # until it is asked again
    assert causes["idle: nothing sent"] == pytest.approx(1.0)  # nothing has failed before it
    assert causes["generating"] == pytest.approx(3.0)
    assert found.idle_s == pytest.approx(10.0 - 2.0 - 3.0)


def test_an_outage_lasts_from_a_failure_to_the_next_request_or_the_last_answer_elsewhere() -> None:
    refused = requests(A, (0.5, 0.51), (2.0, 2.01), name="failed request")
    answers = requests(B, (0.5, 4.0), (2.1, 6.0))
    causes = accounts_of([*TRAINER, *refused, *answers, Span(A, "push", 3.0, 3.5)])[A].causes
    assert causes["failed"] == pytest.approx(6.0 - 0.5 - 0.5)  # repaired meanwhile
    assert causes["push"] == pytest.approx(0.5)
    assert causes["idle: training"] == pytest.approx(9.5 - 6.0)
    assert "idle: nothing sent" not in causes


def test_what_began_before_the_batch_counts_from_its_begin() -> None:
    spans = [*TRAINER, Span(A, "push", -3.0, 0.25)]
    causes = accounts_of(spans)[A].causes
    assert causes == pytest.approx({"push": 0.25, "idle: border": 9.75})


times = st.tuples(st.floats(0, 9), st.floats(0.01, 5)).map(lambda pair: (pair[0], sum(pair)))


few = st.lists(times, max_size=3)


@given(st.lists(times, max_size=6), few, few, few)
def test_causes_add_up_whatever_overlaps(own, evaluations, pushes, failures) -> None:
    spans = [
        *TRAINER,
        *requests(A, *own),
        *requests(A, *evaluations, name="evaluation"),
        *requests(A, *pushes, name="push"),
        *requests(A, *failures, name="failed request"),
    ]
    for each in account([batch(spans, 10.0)]):
        assert sum(each.causes.values()) == pytest.approx(each.wall_s, abs=1e-9)
        assert min(each.causes.values()) >= -1e-9


def test_shares_of_several_batches_are_of_their_time_together() -> None:
    first = LaneAccount("rank 0", 0, 1.0, {"train": 1.0})
    second = LaneAccount("rank 0", 1, 3.0, {"train": 1.0, "starved": 2.0})
    assert mean_shares([first, second]) == {"train": 0.5, "starved": 0.5}
    assert second.idle_s == 2.0 and mean_shares([]) == {}


def test_a_batch_without_spans_has_no_accounts() -> None:
    assert account([]) == []
