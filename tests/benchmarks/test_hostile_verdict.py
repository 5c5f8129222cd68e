"""The last line of the benchmark counts what went wrong in any run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parts.hostile.plan import RunPlan
from benchmarks.parts.hostile.run import Outcome
from benchmarks.parts.hostile.verdict import Total
from benchmarks.parts.ledger import keep_ledger
from benchmarks.parts.trained_contents import ContentCheck

PLAN = RunPlan(0, 0, (), ())
LEDGER = keep_ledger([], set())  # nothing to train, and nothing trained
CHECK = ContentCheck(7, 224, 3000, (), 1e-6, visible=0.2)


def after(ledger=LEDGER, check=CHECK, verdict="on-policy", **outcome) -> Total:
    total = Total()
    total.add("run-0", PLAN, Outcome(**outcome), ledger, check, verdict)
    return total


def test_a_good_run_leaves_zeros():
    total = after(peak_mb=700.0)
    total.happened.update({"html": 3, "never": 0})
    zeros = ("crashed", "prompts_lost", "prompts_trained_twice", "wrong_content_trained")
    line = total.line(calm_mb=600.0)
    assert line == {"behaviours": 1, "runs": 1, "peak_over_calm_mb": 100, "resume_failed": 0} | (
        dict.fromkeys(zeros, 0)
    )
    assert total.is_good(600.0) and not total.is_good(400.0)
    assert total.line(800.0)["peak_over_calm_mb"] == 0


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
    line = total.line(0.0)
    assert line[key] == count and total.problems and not total.is_good(0.0)
    others = {"crashed", "prompts_lost", "prompts_trained_twice", "wrong_content_trained",
              "resume_failed"} - {key}  # fmt: skip
    assert all(line[other] == 0 for other in others)


def test_a_check_that_sees_nothing_is_a_problem():
    assert after(check=replace(CHECK, visible=1e-4)).problems


def test_the_calm_run_is_no_hostile_one():
    total = Total()
    total.add("calm", RunPlan(-1, 0, (), ()), Outcome(peak_mb=9.0), LEDGER, CHECK, "on-policy")
    assert total.line(0.0)["runs"] == 0 and total.peak_mb == 0
