"""What the rewards with a formula give, by hand: for the tests, and for those of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easyrl.schema import Prompt

Reward = Callable[..., list[float]]


def prompt(system: str = "", text: str = "question", **metadata: Any) -> Prompt:
    return Prompt(5, np.array([1, 2], np.int32), text, "72", 0, metadata, "p.jsonl:6", system)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def check_length_target(reward: Reward) -> None:
    asked = prompt(target_tokens=1000)
    lengths = [0, 400, 999, 1000, 1001, 3000]
    responses = [np.full(length, 3, np.int32) for length in lengths]
    found = reward(asked, [""] * 6, responses)  # alpha 0.0003
    assert found == pytest.approx([-0.3, -0.18, -0.0003, 0.0, -0.0003, -0.6], abs=1e-12)
    found = reward(asked, [""], [np.full(1500, 3, np.int32)], alpha=0.01)
    assert found == pytest.approx([-5.0], abs=1e-12)


def check_thought(reward: Reward) -> None:
    """``</think>`` is the tokens 8, 9: what is before its first occurrence counts."""
    asked = prompt(target_tokens=4)
    responses = [
        ids(1, 1, 1, 1, 8, 9, 5, 5, 5, 5),  # 4
        ids(1, 8, 1, 9, 8, 9, 8, 9),  # 4
        ids(8, 9, 1, 1),  # 0
        ids(1, 1, 1, 1, 1, 8),  # never closed: 6
        ids(8),  # 1
        ids(),  # 0
    ]
    found = reward(asked, [""] * 6, responses, alpha=1.0, end_of_thought=[8, 9])
    assert found == [0.0, 0.0, -4.0, -2.0, -3.0, -4.0]


def check_overlong(reward: Reward) -> None:
    """L_max 100, L_cache 20."""
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    responses = [np.zeros(length, np.int32) for length in lengths]
    found = reward(prompt(), [""] * 9, responses, max_tokens=100, buffer=0.2)
    expected = [0.0, 0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
    assert found == pytest.approx(expected, abs=1e-12)


def check_repetition(reward: Reward) -> None:
    responses = [
        ids(1, 2, 3, 4),  # 12 23 34
        ids(1, 2, 1, 2, 1),  # 12 21 12 21: half
        ids(7, 7, 7, 7, 7),  # one of four
        ids(1, 2),
        ids(1),
        ids(),
        ids(1, 256, 1, 256, 65536),  # the bytes of neighbours must not make equals
    ]
    found = reward(prompt(), [""] * 7, responses, ngram_size=2)
    assert found == pytest.approx([0.0, -0.5, -0.75, 0.0, 0.0, 0.0, -0.25], abs=1e-12)


def check_thinking_toggle(reward: Reward) -> None:
    on, off = prompt(thinking="on"), prompt(thinking="off")
    table = [
        ("<think>hm</think>72", 1.0, 0.0),
        ("\n<think>a\nb</think>\n\n72\n", 1.0, 0.0),
        ("<think></think>72", 0.0, 0.0),
        ("<think> \n</think>72", 0.0, 0.0),
        ("<think>hm</think>", 0.0, 0.0),
        ("<think>hm</think> ", 0.0, 0.0),
        ("<think>hm", 0.0, 0.0),
        ("hm</think>72", 0.0, 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0, 0.0),
        ("so <think>hm</think>72", 0.0, 0.0),
        ("<think><think>a</think>b", 0.0, 0.0),
        ("72", 0.0, 1.0),
        ("I think 72", 0.0, 1.0),
    ]
    texts = [text for text, _, _ in table]
    assert reward(on, texts, []) == [expected for _, expected, _ in table]
    assert reward(off, texts, []) == [expected for _, _, expected in table]


CHECKS = {
    "length_target": (check_length_target, check_thought),
    "overlong": (check_overlong,),
    "repetition": (check_repetition,),
    "thinking_toggle": (check_thinking_toggle,),
}
