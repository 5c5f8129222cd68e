"""The last line of the benchmark counts what went wrong in any run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parts.hostile.behaviour import SocketBehaviour
from benchmarks.parts.hostile.plan import Due, RunPlan
from benchmarks.parts.hostile.run import Outcome
from benchmarks.parts.hostile.sockets import MASTER_STORE, OTHER_STORE, WEIGHTS, kinds_of
from benchmarks.parts.hostile.verdict import Total
from benchmarks.parts.ledger import keep_ledger
from benchmarks.parts.trained_contents import ContentCheck

PLAN = RunPlan(0, 0, (), ())
LEDGER = keep_ledger([], set())  # nothing to train, and nothing trained
CHECK = ContentCheck(7, 224, 3000, (), (), 1e-6, visible=0.2)


def after(ledger=LEDGER, check=CHECK, verdict="on-policy", calm_mb=0.0, **outcome) -> Total:
    total = Total(calm_mb={1: calm_mb})
    total.add("run-0", PLAN, Outcome(**outcome), ledger, check, verdict)
    return total


def test_a_good_run_leaves_zeros():
    total = after(peak_mb=700.0, calm_mb=600.0)
    total.happened.update({"html": 3, "never": 0})
    zeros = ("crashed", "prompts_lost", "prompts_trained_twice", "wrong_content_trained",
             "wrong_without_gradient")  # fmt: skip
    line = total.line()
    assert line == {"behaviours": 1, "runs": 1, "peak_over_calm_mb": 100, "resume_failed": 0} | (
        dict.fromkeys(zeros, 0)
    )
    assert total.is_good() and not after(peak_mb=700.0, calm_mb=400.0).is_good()
    assert after(peak_mb=700.0, calm_mb=800.0).line()["peak_over_calm_mb"] == 0


@pytest.mark.parametrize(
    "changes, counted",
    [
        ({"ledger": replace(LEDGER, prompts_lost=2, problems=("a", "b"))}, ("prompts_lost", 2)),
        ({"ledger": replace(LEDGER, prompts_excluded=3)}, ("prompts_lost", 3)),
        ({"ledger": replace(LEDGER, prompts_skipped=1, problems=("a",))}, ("prompts_lost", 1)),
        (
            {"ledger": replace(LEDGER, prompts_trained_twice=1, problems=("a",))},
            ("prompts_trained_twice", 1),
        ),
        (
            {"ledger": replace(LEDGER, wrong_version_trained=1, problems=("a",))},
            ("wrong_content_trained", 1),
        ),
        ({"check": replace(CHECK, wrong_groups=("x", "y"))}, ("wrong_content_trained", 2)),
        ({"verdict": "NOT on-policy: line 4"}, ("wrong_content_trained", 1)),
        ({"crashed": ["ended with 1"], "ledger": None, "check": None}, ("crashed", 1)),
        ({"resume_failed": ["2"], "ledger": None, "check": None}, ("resume_failed", 1)),
    ],
)
def test_what_is_wrong_is_counted_and_makes_the_benchmark_fail(changes, counted):
    total = after(**changes)
    key, count = counted
    line = total.line()
    assert line[key] == count and total.problems and not total.is_good()
    others = {"crashed", "prompts_lost", "prompts_trained_twice", "wrong_content_trained",
              "resume_failed"} - {key}  # fmt: skip
    assert all(line[other] == 0 for other in others)


def test_a_check_that_sees_nothing_is_a_problem():
    assert after(check=replace(CHECK, visible=1e-4)).problems


def test_the_calm_run_is_no_hostile_one():
    total = Total()
    total.add("calm", RunPlan(-1, 0, (), ()), Outcome(peak_mb=9.0), LEDGER, CHECK, "on-policy")
    assert total.line()["runs"] == 0 and total.calm_mb == {1: 9.0}


def test_memory_is_held_against_the_calm_run_of_as_many_ranks():
    total = Total(calm_mb={1: 600.0, 2: 1100.0})
    for num_ranks, peak_mb in ((1, 610.0), (2, 1130.0)):
        plan = replace(PLAN, num_ranks=num_ranks)
        total.add("run", plan, Outcome(peak_mb=peak_mb), LEDGER, CHECK, "on-policy")
    assert total.line()["peak_over_calm_mb"] == 30


def test_a_stranger_has_to_meet_all_that_ranks_listen_at():
    visit = SocketBehaviour("visit", "socket", "", print)  # type: ignore[arg-type]
    plan = RunPlan(0, 0, (), (Due(visit, 2),), num_ranks=2)
    gloo = {"gloo of rank 0", "gloo of rank 1"}
    assert kinds_of(2) == {WEIGHTS, MASTER_STORE, OTHER_STORE, *gloo}
    for met, unmet in ((set(), kinds_of(2)), ({WEIGHTS, *gloo}, {MASTER_STORE, OTHER_STORE}),
                       (set(kinds_of(2)), set())):  # fmt: skip
        total = Total(calm_mb={2: 0.0})
        outcome = Outcome(met={"visit": met} if met else {})
        total.add("run", plan, outcome, LEDGER, CHECK, "on-policy")
        assert total.unmet == {"visit": unmet}
