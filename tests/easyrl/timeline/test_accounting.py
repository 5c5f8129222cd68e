"""Causes of a lane are disjoint, add up to its time, and are what was running."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.metrics.step_progress import DOES
from easyrl.timeline.accounting import LaneAccount, account, mean_shares, most_unexplained
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
            "idle: no prompt left": 1.0,  # the other generates
            "tail": 1.0,
            "idle: others' tail": 1.0,  # done at 6, and the other at 7
            "idle: training": 2.5,  # to the end of the step, at 9.5
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
    assert causes["idle: no prompt left"] == pytest.approx(0.4)
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
    # nothing has failed before it, and nothing else is seen; from 9.5 on trainer and weights
    assert causes["unexplained"] == pytest.approx(1.0)
    assert causes["generating"] == pytest.approx(3.0)
    assert found.idle_s == pytest.approx(1.0 + 2.5 + 0.5)
    assert sum(causes.values()) == pytest.approx(10.0)


def test_an_outage_lasts_from_a_failure_to_the_next_request_or_the_last_answer_elsewhere() -> None:
    refused = requests(A, (0.5, 0.51), (2.0, 2.01), name="failed request")
    answers = requests(B, (0.5, 4.0), (2.1, 6.0))
    causes = accounts_of([*TRAINER, *refused, *answers, Span(A, "push", 3.0, 3.5)])[A].causes
    assert causes["failed"] == pytest.approx(6.0 - 0.5 - 0.5)  # repaired meanwhile
    assert causes["push"] == pytest.approx(0.5)
    assert causes["idle: training"] == pytest.approx(9.5 - 7.0)
    assert causes["unexplained"] == pytest.approx(7.0 - 6.0)  # all is answered, the trainer waits
    assert set(causes) == {"idle: border", "failed", "push", "idle: training", "unexplained"}


def test_what_began_before_the_batch_counts_from_its_begin() -> None:
    spans = [*TRAINER, Span(A, "push", -3.0, 0.25)]
    causes = accounts_of(spans)[A].causes
    # nothing is asked: begin, wait, train, wait, train and step, sync
    expected = {"push": 0.25, "idle: border": 0.75 + 0.5, "unexplained": 2 + 1}
    assert causes == pytest.approx({**expected, "idle: training": 3 + 2.5})


GROUP_1, GROUP_2, GROUP_3 = ({"epoch": 0, "index": number} for number in (1, 2, 3))


def group(start_s: float, end_s: float, args, *, trained: bool = True) -> list[Span]:
    """A prompt of the batch, and where it is trained its way to the trainer."""
    found = [Span("producer 0", "group", start_s, end_s, args)]
    if trained:
        found.append(Span("producer 0", "queued", end_s, end_s + 0.1, args))
    return found


def test_a_prompt_that_nobody_sends_leaves_idle_endpoints_unexplained() -> None:
    asked = [*requests(A, (1.0, 3.0)), *requests(B, (1.0, 6.0), (5.0, 6.5))]
    sent_late = [*group(1.0, 3.0, GROUP_1), *group(1.0, 6.0, GROUP_2), *group(5.0, 6.5, GROUP_3)]
    causes = accounts_of([*TRAINER, *asked, *sent_late])[A].causes
    # GROUP_3 could have been here; and at the end all is answered, and the trainer still waits, 0.1
    # of it with a group in the queue
    assert causes["unexplained"] == pytest.approx(5.0 - 3.0 + 7.0 - 6.6)
    assert causes["idle: others' tail"] == pytest.approx(6.5 - 5.0)


def test_no_prompt_is_left_until_a_group_is_rejected() -> None:
    asked = [*requests(A, (1.0, 3.0), (4.5, 6.0)), *requests(B, (1.0, 4.0), (1.0, 7.0))]
    groups = [
        *group(1.0, 3.0, GROUP_1),
        *group(1.0, 4.0, GROUP_2, trained=False),  # its replacement is sent half a second later
        *group(1.0, 7.0, {"epoch": 0, "index": 4}),
        *group(4.5, 6.0, GROUP_3),
    ]
    # GROUP_3 is trained, so that it counts as one that could be drawn all along but for the one
    # that was rejected: three may be drawn, and a fourth at 4
    causes = accounts_of([*TRAINER, *asked, *groups])[A].causes
    assert causes["idle: no prompt left"] == pytest.approx(4.0 - 3.0)
    assert causes["unexplained"] == pytest.approx(4.5 - 4.0)
    assert causes["idle: others' tail"] == pytest.approx(7.0 - 6.0)


def test_an_endpoint_waits_for_rewards_where_only_they_run() -> None:
    spans = [
        *phases(("begin", 1), ("wait", 6), ("train", 2), ("sync", 1)),
        *requests(A, (0.5, 4.0)),
        Span("producer 0", "reward", 3.0, 5.0),
        Span("producer 0", "group reward", 4.5, 6.0),
    ]
    causes = accounts_of(spans)[A].causes
    assert causes["idle: rewards"] == pytest.approx(6.0 - 4.0)
    assert causes["unexplained"] == pytest.approx(1.0)  # scored, and the trainer still waits
    assert causes["idle: training"] == pytest.approx(2.0)
    assert causes["idle: border"] == pytest.approx(0.5 + 1.0)


def test_a_group_that_waits_to_be_taken_is_the_trainers_time() -> None:
    spans = [
        *phases(("begin", 1), ("wait", 6), ("train", 2), ("sync", 1)),
        *requests(A, (0.5, 4.0)),
        Span("producer 0", "queued", 5.0, 6.5),
    ]
    causes = accounts_of(spans)[A].causes
    assert causes["idle: training"] == pytest.approx(1.5 + 2.0)
    assert causes["unexplained"] == pytest.approx(1.0 + 0.5)


def test_an_endpoint_that_is_never_asked_has_no_prompt_left() -> None:
    spans = [*TRAINER, *requests(A, (0.5, 6.0)), Span(B, "push", -1.0, 0.2)]
    causes = accounts_of(spans)[B].causes
    assert causes["idle: no prompt left"] == pytest.approx(6.0 - 1.0)
    assert "idle: others' tail" not in causes


def test_each_phase_of_a_trainer_is_work_the_border_or_no_reason() -> None:
    for name in set(DOES) - {"wait", "other"}:
        spans = [*requests(A, (0.0, 1.0)), *phases((name, 2))]
        causes = accounts_of(spans, end_s=2.0)[A].causes
        assert causes.keys() & {"idle: training", "idle: border"}, name
    for name in ("wait", "other"):
        spans = [*requests(A, (0.0, 1.0)), *phases((name, 2))]
        assert accounts_of(spans, end_s=2.0)[A].unexplained_s == pytest.approx(1.0), name


def test_nothing_is_called_idle_where_requests_may_be_missing() -> None:
    whole = batch([*TRAINER, *ENDPOINTS], 10.0)
    thinned = msgspec.structs.replace(whole, left_out=7)
    before, after = ({each.lane: each for each in account([spans])} for spans in (whole, thinned))
    assert after["rank 0"] == before["rank 0"] and after["rank 0"].left_out == 0
    for lane in (A, B):
        assert after[lane].left_out == 7 and after[lane].idle_s == 0
        assert not any(cause.startswith("idle") for cause in after[lane].causes)
        assert after[lane].causes["not recorded"] == pytest.approx(
            before[lane].idle_s + before[lane].unexplained_s
        )
        assert sum(after[lane].causes.values()) == pytest.approx(10.0)
    assert after[A].causes["push"] == before[A].causes["push"]
    assert most_unexplained([after[A]]) == pytest.approx(after[A].causes["not recorded"] / 10)
    assert most_unexplained([]) == 0


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
