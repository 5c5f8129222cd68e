"""Collapse alarms: what raises each, what does not, and what is remembered over a resume."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from easyrl.config import AlarmsConfig, ConfigError
from easyrl.config.file import validate_config
from easyrl.config.rewards import ScoringConfig
from easyrl.config.rollout import RolloutConfig
from easyrl.config.trainer import TrainerConfig
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.alarms.rules import RULES
from easyrl.metrics.event_log import ignore
from easyrl.metrics.trackers import JsonlTracker, read_metrics
from easyrl.recipes.dapo import DAPO
from tests.easyrl.metrics.alarm_histories import (
    STEADY,
    Batch,
    batches,
    healthy,
    noisy,
    raised_by,
)

ROOT = Path(__file__).parents[3]
NAMES = {rule.name for rule in RULES}
BASELINE = 16  # 5 of warm-up, 11 of the first window

# By rule: a metric, the value at which its alarm is due with the defaults, and the side. Worked out
# by hand from STEADY and docs/alarms.md, not read from the configuration.
LIMITS = {
    "entropy_collapse": ("policy/entropy", 0.06, "below"),
    "length_collapse": ("response/mean_tokens", 400.0, "below"),
    "truncation": ("response/truncated", 0.30, "above"),
    "no_signal": ("reward/flat_groups", 0.75, "above"),
    "kl": ("policy/kl", 0.5, "above"),
    "clip_fraction": ("policy/clip_high", 0.09, "above"),  # and 0.01 on the other side
    "grad_norm": ("grad_norm", 0.9, "above"),
    "repetition": ("response/repetition", 0.22, "above"),
    "logprob_diff": ("policy/logprob_diff", 0.015, "above"),
}


def moved(metric: str, value: float, count: int = 20) -> list[Batch]:
    return batches(BASELINE) + [STEADY | {metric: value} for _ in range(count)]


# ---- each rule -----------------------------------------------------------------------------------


def test_the_limits_are_of_all_rules_but_the_rebound() -> None:
    assert set(LIMITS) == NAMES - {"entropy_rebound"}


@pytest.mark.parametrize("name", LIMITS)
def test_each_alarm_is_raised_at_its_threshold_and_not_short_of_it(name: str) -> None:
    metric, limit, side = LIMITS[name]
    notch = 1.01 if side == "above" else 0.99
    assert [raised for raised, _ in raised_by(moved(metric, limit * notch))] == [name]
    assert raised_by(moved(metric, limit / notch)) == []


def test_the_first_windows_are_not_compared_with_batches_of_their_own() -> None:
    # behind batch 27 the last window has none in common with batches 6 to 16
    assert raised_by(moved("grad_norm", 3.0)) == [("grad_norm", 27)]
    # a level needs no beginning to be compared with
    assert raised_by(batches(30, policy__kl=0.6)) == [("kl", 16)]


@pytest.mark.parametrize(("regained", "expected"), [(0.51, True), (0.49, False)])
def test_entropy_that_falls_and_rises_again(regained: float, expected: bool) -> None:
    low = 0.3
    history = batches(BASELINE) + batches(10, policy__entropy=low)
    history += batches(10, policy__entropy=low + regained * (0.6 - low))
    names = [name for name, _ in raised_by(history)]
    assert names == (["entropy_rebound"] if expected else [])


@pytest.mark.parametrize(("fallen", "expected"), [(0.34, True), (0.32, False)])
def test_entropy_has_to_have_fallen_to_rise_again(fallen: float, expected: bool) -> None:
    history = batches(BASELINE) + batches(10, policy__entropy=0.6 * (1 - fallen)) + batches(10)
    assert bool(raised_by(history)) == expected


def test_entropy_that_rises_from_the_start_is_no_rebound() -> None:
    history = [STEADY | {"policy/entropy": 0.3 + 0.02 * i} for i in range(60)]
    assert raised_by(history) == []


def test_clipped_tokens_and_rounding_count_from_their_floors() -> None:
    for name, metric, floor, factor in (
        ("clip_fraction", "policy/clip_high", 0.01, 5.0),
        ("logprob_diff", "policy/logprob_diff", 3e-3, 3.0),
    ):
        from_zero = {"policy/clip_low": 0.0, metric: 1e-7}
        begin = [STEADY | from_zero for _ in range(BASELINE)]
        for notch, expected in ((1.01, [name]), (0.99, [])):
            end = [STEADY | from_zero | {metric: floor * factor * notch} for _ in range(15)]
            assert [raised for raised, _ in raised_by(begin + end)] == expected


def test_groups_that_the_recipe_rejects_teach_nothing_either() -> None:
    rejecting = batches(20, reward__flat_groups=0.0, batch__groups_rejected=97.0)  # of 129
    assert [name for name, _ in raised_by(rejecting)] == ["no_signal"]
    rejecting = batches(20, reward__flat_groups=0.0, batch__groups_rejected=95.0)  # of 127
    assert raised_by(rejecting) == []


def test_entropy_may_go_while_the_reward_comes() -> None:
    rising = [
        STEADY | {"policy/entropy": 0.6 * 0.9**i, "reward/mean": 0.1 + 0.01 * i} for i in range(60)
    ]
    assert raised_by(rising) == []
    flat = [batch | {"reward/mean": 0.5} for batch in rising]
    assert [name for name, _ in raised_by(flat)] == ["entropy_collapse"]


def test_short_responses_with_a_better_reward_are_no_collapse() -> None:
    short = batches(20, response__mean_tokens=100.0, reward__mean=0.51)
    assert raised_by(batches(BASELINE) + short) == []
    worse = batches(20, response__mean_tokens=100.0, reward__mean=0.49)
    assert [name for name, _ in raised_by(batches(BASELINE) + worse)] == ["length_collapse"]


# ---- noise ---------------------------------------------------------------------------------------


def test_a_thousand_healthy_noisy_runs_raise_nothing() -> None:
    rng = np.random.default_rng(0)
    raised = [alarm for _ in range(1000) for alarm in raised_by(healthy(rng, 60))]
    assert raised == []


COLLAPSES = {
    "entropy_collapse": {"policy/entropy": 0.02},
    "length_collapse": {"response/mean_tokens": 0.3, "reward/mean": 0.5},
    "truncation": {"response/truncated": 12.0},
    "no_signal": {"reward/flat_groups": 3.8},
    "kl": {"policy/kl": 100.0},
    "clip_fraction": {"policy/clip_high": 15.0, "policy/clip_low": 3.0},
    "grad_norm": {"grad_norm": 6.0},
    "repetition": {"response/repetition": 30.0},
    "logprob_diff": {"policy/logprob_diff": 6.0},
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_each_collapse_is_seen_through_noise_and_taken_for_no_other(name: str) -> None:
    """The figure moves by the given factor, slowly, over 40 batches."""
    rng = np.random.default_rng(sorted(COLLAPSES).index(name))
    history = batches(30)
    for step in range(50):
        path = min(step / 40, 1.0)
        factors = {metric: factor**path for metric, factor in COLLAPSES[name].items()}
        history.append({n: v * factors.get(n, 1.0) for n, v in STEADY.items()})
    raised = raised_by(noisy(history, rng))
    assert [raised_name for raised_name, _ in raised] == [name]
    assert 35 < raised[0][1] <= 80


def test_spikes_in_fewer_than_half_of_the_batches_are_no_growth() -> None:
    history = batches(60)
    for i in range(0, 60, 3):
        history[i] = history[i] | {"grad_norm": 50.0}
    assert raised_by(history) == []


def test_an_alarm_is_raised_once_until_it_has_ceased() -> None:
    config = AlarmsConfig(warmup_batches=0, window=1)
    shares = [0.74, 0.76, 0.74, 0.76, 0.61, 0.76, 0.59, 0.74, 0.76]  # ceases below 0.6
    history = [STEADY | {"reward/flat_groups": share} for share in shares]
    assert raised_by(history, config) == [("no_signal", 2), ("no_signal", 9)]


def test_what_is_missing_or_not_finite_is_left_out_of_the_medians() -> None:
    history = batches(BASELINE) + batches(20, grad_norm=0.3)
    for i in range(BASELINE, 36, 3):
        history[i] = history[i] | {"grad_norm": math.nan}
    assert raised_by(history) == []
    without = [{n: v for n, v in batch.items() if "policy" not in n} for batch in history]
    assert raised_by(without) == []
    all_bad = batches(BASELINE) + batches(20, grad_norm=math.inf)
    assert raised_by(all_bad) == []  # trainer.max_bad_steps ends such a run


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIMITS)
def test_null_switches_an_alarm_off_and_another_threshold_moves_it(name: str) -> None:
    metric, limit, side = LIMITS[name]
    notch = 1.01 if side == "above" else 0.99
    history = moved(metric, limit * notch)
    assert raised_by(history, AlarmsConfig(**{name: None})) == []
    threshold = getattr(AlarmsConfig(), name)
    further = threshold * (1.1 if side == "above" else 0.9)
    assert raised_by(history, AlarmsConfig(**{name: further})) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"on_alarm": "halt"}, "alarms.on_alarm: Input should be 'warn', 'checkpoint' or 'stop'"),
        ({"grad_norm": 1.0}, "alarms.grad_norm: Input should be greater than 1"),
        ({"entropy_collapse": 1.0}, "alarms.entropy_collapse: Input should be less than 1"),
        ({"no_signal": 75.0}, "alarms.no_signal: Input should be less than or equal to 1"),
        ({"window": 0}, "alarms.window: Input should be greater than 0"),
        ({"entropy": 0.1}, "alarms.entropy: unknown key; did you mean"),
        (
            {"on_alarm": "stop"} | dict.fromkeys(NAMES),
            "alarms.on_alarm: has no effect with all thresholds null",
        ),
    ],
)
def test_what_the_section_refuses(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_config({"alarms": section})


# ---- what is said and remembered -----------------------------------------------------------------


def test_an_alarm_is_told_with_figures_and_remedy_as_an_event_and_as_a_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[tuple[str, dict[str, object]]] = []
    alarms = Alarms(AlarmsConfig(), lambda event, **fields: events.append((event, fields)))
    assert alarms.look(0, {"sync/bytes": 1.0}) == {}
    with caplog.at_level(logging.WARNING):
        shown = [alarms.look(i + 1, m) for i, m in enumerate(moved("grad_norm", 3.0, count=12))]
    assert [metrics["alarm/grad_norm"] for metrics in shown] == [0.0] * 26 + [1.0, 1.0]
    assert set(shown[-1]) == {f"alarm/{name}" for name in NAMES}
    [record] = caplog.records
    assert record.getMessage() == (
        "alarm grad_norm behind step 27: the gradient's norm is 3, 10 times the 0.3 that the run "
        "began with (limit 3), in medians over 11 batches. What may help: set "
        "trainer.max_grad_norm to 0.1 or 0.05 (INTELLECT-2), or lower trainer.learning_rate"
    )
    [(event, told)] = events
    assert event == "alarm"
    assert told["name"] == "grad_norm" and told["step"] == 27 and told["threshold"] == 3.0
    assert told["value"] == pytest.approx(10.0)


def test_only_what_a_run_measures_has_an_alarm_metric() -> None:
    without_kl = {name: value for name, value in STEADY.items() if name != "policy/kl"}
    shown = Alarms(AlarmsConfig(repetition=None), ignore).look(1, without_kl)
    assert set(shown) == {f"alarm/{name}" for name in NAMES - {"kl", "repetition"}}


@pytest.mark.parametrize("cut", [1, 16, 26, 27, 34, 48, 49, 70])
def test_a_resumed_run_has_the_alarms_of_one_that_went_through(tmp_path: Path, cut: int) -> None:
    """By ``metrics.jsonl`` up to the step of its checkpoint; the file has more."""
    rng = np.random.default_rng(3)
    history = noisy(moved("grad_norm", 2.0) + moved("grad_norm", 0.3, count=15), rng)
    history += noisy(moved("policy/kl", 2.0, count=30), rng)
    history[20]["grad_norm"] = history[50]["grad_norm"] = math.nan
    whole, file = Alarms(AlarmsConfig(), ignore), tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(file, -1)
    tracker.log(0, {"eval/accuracy": 0.1})
    states, shown = [], []
    for step, metrics in enumerate(history, start=1):
        shown.append(whole.look(step, metrics))
        states.append(whole.raised)
        tracker.log(step, metrics | shown[-1])
    tracker.close()
    assert {name for state in states for name in state} == {"grad_norm", "kl"}
    assert len(set(states)) >= 3  # one of them ceases

    JsonlTracker(file, cut).close()  # drops what comes again
    resumed = Alarms(AlarmsConfig(), ignore)
    resumed.add_earlier(read_metrics(file))
    assert resumed.raised == states[cut - 1] and resumed.take() == []
    again = [resumed.look(cut + 1 + i, metrics) for i, metrics in enumerate(history[cut:])]
    assert again == shown[cut:]
    assert [a for a in whole.take() if a.step > cut] == resumed.take()


# ---- what the remedies and the page say ----------------------------------------------------------


def test_remedies_name_keys_that_there_are() -> None:
    keys = {
        "trainer": set(TrainerConfig.model_fields),
        "rollout": set(RolloutConfig.model_fields),
        "scoring": set(ScoringConfig.model_fields),
        "model": {"dtype"},
        "recipe": {field.name for field in fields(DAPO)} | {"name"},
    }
    for rule in RULES:
        named = re.findall(r"\b(trainer|rollout|scoring|model|recipe)\.([a-z_]+)", rule.remedy)
        assert named, rule.name
        assert all(key in keys[section] for section, key in named), rule.name


def test_the_page_has_each_alarm_with_its_default_and_keys() -> None:
    page = (ROOT / "docs/alarms.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\|$", page, re.MULTILINE)
    defaults = AlarmsConfig()
    for rule in RULES:
        assert rows.count(rule.name) == 1, rule.name
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{rule.name}` |")]
        assert f"`{getattr(defaults, rule.name):g}`" in row
        for key in re.findall(r"\b(?:trainer|rollout|scoring|recipe)\.[a-z_]+", rule.remedy):
            assert f"`{key}" in row, (rule.name, key)
        for source in re.findall(r"arXiv (\d{4}\.\d{5})", rule.source):
            assert source in row, (rule.name, source)
