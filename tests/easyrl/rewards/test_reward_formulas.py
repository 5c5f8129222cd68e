"""Length target, overlong, repetition and thinking toggle: by hand, and against other ways to say
the same; and that the examples by hand would see a mistake."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards.functions import check_prompts, check_rewards, load_reward
from easyrl.rewards.overlong import overlong
from easyrl.rewards.repetition import repetition
from easyrl.rewards.thinking_toggle import thinking_toggle
from tests.easyrl.rewards.formula_cases import CHECKS, ids, prompt

ROOM = Path(__file__).parents[3] / "easyrl" / "rewards"


@pytest.mark.parametrize("name", CHECKS)
def test_by_hand(name):
    for check in CHECKS[name]:
        check(load_reward(RewardConfig(name=name)))


# ---- the examples by hand see mistakes: each change of one place is noticed ----

MUTATIONS = [
    ("length_target", "-alpha * abs(", "alpha * abs("),
    ("length_target", "abs(target - length)", "(target - length)"),
    ("length_target", "alpha: PositiveFloat = 0.0003", "alpha: PositiveFloat = 0.003"),
    ("length_target", "int(found[0])", "int(found[-1])"),
    ("length_target", "else len(token_ids)\n", "else 0\n"),
    ("length_target", ".all(axis=1)", ".any(axis=1)"),
    ("overlong", "- cache - lengths", "- lengths"),
    ("overlong", "/ cache", "/ max_tokens"),
    ("overlong", "-1.0, 0.0", "-2.0, 0.0"),
    ("overlong", "-1.0, 0.0", "-1.0, 1.0"),
    ("overlong", "max_tokens - cache - lengths", "lengths - max_tokens + cache"),
    ("repetition", "- 1.0 for", "for"),
    ("repetition", "- size + 1", "- size"),
    ("repetition", "4 * at :", "at :"),
    ("repetition", "num_ngrams < 1", "num_ngrams < 0"),
    ("thinking_toggle", "not _is_on", "_is_on"),
    ("thinking_toggle", 'not in text and "</think>"', 'not in text or "</think>"'),
    ("thinking_toggle", "bool(match[1].strip()) and", ""),
    ("thinking_toggle", "and bool(match[2].strip())", ""),
    ("thinking_toggle", 'text.count("<think>") == 1 and', ""),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTATIONS)
def test_a_changed_formula_fails(name, old, new):
    source = (ROOM / f"{name}.py").read_text()
    assert source.count(old) == 1
    changed: dict = {"__name__": f"changed_{name}"}
    exec(compile(source.replace(old, new), f"changed_{name}", "exec"), changed)
    with pytest.raises((AssertionError, ValueError, ArithmeticError)):
        for check in CHECKS[name]:
            check(changed[name])


# ---- other ways to say the same ----


@pytest.mark.parametrize(("max_tokens", "cache"), [(20480, 4096), (64, 16), (10, 10)])
def test_overlong_is_eq_13(max_tokens, cache):
    def eq_13(length: int) -> float:
        if length <= max_tokens - cache:
            return 0.0
        if length <= max_tokens:
            return ((max_tokens - cache) - length) / cache
        return -1.0

    lengths = sorted({*range(0, 2 * max_tokens, max(1, max_tokens // 50)), max_tokens - cache})
    responses = [np.zeros(length, np.int32) for length in lengths]
    found = overlong(
        prompt(), [""] * len(lengths), responses, max_tokens=max_tokens, buffer=cache / max_tokens
    )
    assert found == pytest.approx([eq_13(length) for length in lengths], abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_counts_ngrams(tokens, size):
    ngrams = Counter(zip(*(tokens[start:] for start in range(size)), strict=False))
    repeated = sum(count - 1 for count in ngrams.values())
    expected = -repeated / sum(ngrams.values()) if ngrams else 0.0
    (found,) = repetition(prompt(), [""], [ids(*tokens)], ngram_size=size)
    assert found == pytest.approx(expected, abs=1e-12)


def test_repetition_reads_an_array_that_is_a_view():
    every_second = np.array([1, 9, 1, 9, 1, 9, 1, 9], np.int64)[::2]
    assert repetition(prompt(), [""], [every_second], ngram_size=1) == [-0.75]


# ---- where the mode is said ----


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (prompt("detailed thinking on"), 1.0),
        (prompt("detailed thinking off"), 0.0),
        (prompt("Be brief.\nDetailed Thinking On"), 1.0),
        (prompt("detailed thinking off; no, detailed thinking on"), 1.0),
        (prompt(text="1+1? detailed thinking on"), 1.0),
        (prompt("detailed thinking off", text="detailed thinking on"), 0.0),
        (prompt("detailed thinking off", thinking="on"), 1.0),
    ],
)
def test_the_mode_is_what_the_prompt_says(asked, expected):
    assert thinking_toggle(asked, ["<think>a</think>b"], []) == [expected]


def test_a_template_that_opens_the_thought():
    texts = ["a</think>b", "<think>a</think>b", "</think>b", "b"]
    on = thinking_toggle(prompt(thinking="on"), texts, [], think_in_prompt=True)
    off = thinking_toggle(prompt(thinking="off"), texts, [], think_in_prompt=True)
    assert (on, off) == ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0])


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("thinking_toggle", {"think_in_prompt": 1}, "think_in_prompt: .*boolean.* \\(got 1\\)"),
        ("length_target", {"alpha": 0.0}, "alpha: .*greater than 0"),
        ("length_target", {"alpha": -1.0}, "alpha: .*greater than 0"),
        ("length_target", {"end_of_thought": []}, "end_of_thought: .*at least 1"),
        ("length_target", {"end_of_thought": "</think>"}, "end_of_thought: .*list"),
        ("overlong", {}, "overlong takes .*missing a required argument: 'max_tokens'; give"),
        ("overlong", {"max_tokens": 0}, "max_tokens: .*greater than 0"),
        ("overlong", {"max_tokens": 10, "buffer": 0.0}, "buffer: .*greater than 0"),
        ("overlong", {"max_tokens": 10, "buffer": 1.5}, "buffer: .*less than or equal to 1"),
        ("repetition", {"ngram_size": 0}, "ngram_size: .*greater than 0"),
        ("repetition", {"ngram_size": "40"}, "ngram_size: .*integer"),
        ("repetition", {"ngrams": 3}, "repetition takes .*got an unexpected .*'ngrams'; give"),
    ],
)
def test_wrong_kwargs_are_refused_at_the_start(name, kwargs, message):
    with pytest.raises(ConfigError, match=rf"rewards\[0\]\.kwargs: (.|\n)*{message}"):
        check_rewards([RewardConfig(name=name, kwargs=kwargs)])


def test_kwargs_that_fit_are_accepted():
    check_rewards(
        [
            RewardConfig(name="thinking_toggle", kwargs={"field": "mode", "think_in_prompt": True}),
            RewardConfig(name="length_target", kwargs={"alpha": 1, "end_of_thought": [8, 9]}),
            RewardConfig(name="overlong", kwargs={"max_tokens": 10, "buffer": 1}),
            RewardConfig(name="repetition"),
        ]
    )


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("thinking_toggle", prompt(), "says neither 'detailed thinking on' nor 'off'"),
        ("thinking_toggle", prompt(thinking=True), "'thinking' of the prompt is True; it must be"),
        ("thinking_toggle", prompt("undetailed thinking on"), "says neither"),
        ("length_target", prompt(), "'target_tokens' of the prompt is None; it must be a number"),
        ("length_target", prompt(target_tokens="9"), "'target_tokens' of the prompt is '9'"),
        ("length_target", prompt(target_tokens=True), "'target_tokens' of the prompt is True"),
        ("length_target", prompt(target_tokens=0), "'target_tokens' of the prompt is 0"),
    ],
)
def test_a_prompt_that_cannot_be_scored_is_found_at_the_start(name, asked, message):
    fits = prompt(thinking="on", target_tokens=3)
    rewards = [RewardConfig(name="exact"), RewardConfig(name=name)]
    check_prompts(rewards, [fits])
    with pytest.raises(
        ConfigError, match=rf"rewards\[1\]: {name} cannot score p.jsonl:6: .*{message}"
    ):
        check_prompts(rewards, [fits, asked])
    with pytest.raises(ValueError, match=message):
        load_reward(rewards[1])(asked, ["a"], [ids(1)])
