"""Kept episodes: turns, tools and branches as they are written, read and shown."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from easyrl.runtime.schedule import Due
from easyrl.samples.console import ConsoleSample
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, sampled_group
from easyrl.samples.show import print_group
from easyrl.samples.table import COLUMNS, SampleTable
from easyrl.samples.turns import _without_special_ends, shown_turns, tool_calls
from easyrl.schema import Score, TrainedGroup, TrainedResponse
from tests.easyrl.episodes.trees import Logged, episode, group

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
WORDS = {
    10: "What is 2 + 3?",
    11: CALL,
    12: "<tool_response>5</tool_response>",
    13: "It is 5.<|im_end|>",
    14: "five",
    15: "A summary: 5.",
    16: "Done.",
    17: '<|python_tag|>{"name": "add", "parameters": {"a": 2}}<|eom_id|>',
    18: '{"answer": 5}',
}


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(WORDS.get(token, f"t{token}") for token in token_ids)


def kept() -> SampledGroup:
    """One episode: a call and its answer, the same asked again, and a history that was cut."""
    made = episode(
        Logged([10], [11]),
        Logged([10, 11, 12], [13]),
        Logged([10, 11, 12], [14]),
        Logged([15], [16]),
    )
    assert made.episode is not None
    rewards = (0.0, 1.0, 0.5, -0.5)
    said = replace(made.episode, turn_rewards=rewards, failure="game.py:7: KeyError: 'x'")
    whole = replace(
        group(replace(made, episode=said), index=4), scores=(Score(0.5, {"game/reward": 0.5}),)
    )
    places = np.flatnonzero(made.loss_mask)
    response = TrainedResponse(0, places, np.full(len(places), 0.25), np.ones(len(places)))
    return sampled_group(7, TrainedGroup(whole, (response,)), "drawn", {}, skipped=False)


def test_each_turn_says_how_it_stands_to_the_others() -> None:
    (response,) = kept().responses
    turns = list(shown_turns(response, decode))
    assert [(shown.branch, shown.writer) for shown in turns] == [
        *((0, "environment"), (0, "tool results")),
        *((1, "tool results"), (2, "environment")),
    ]
    headings = [shown.heading for shown in turns]
    assert headings[0] == (
        "turn 0 | branch 0 | shown 1 tokens, sampled 1 | reward +0.000 | "
        'calls add({"a": 2, "b": 3})'
    )
    assert headings[1].startswith("turn 1, continues turn 0 | branch 0 | ")
    assert headings[2].startswith("turn 2, branches off behind turn 0 | branch 1 | ")
    assert headings[3] == (
        "turn 3, a new beginning | branch 2 | shown 1 tokens, sampled 1 | reward -0.500"
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    folder.write(7, 0, 1, [kept()])
    (group_again,) = folder.read(7)
    assert group_again == kept()
    (response,) = group_again.responses
    assert (response.num_turns, response.num_branches, response.environment) == (4, 3, "game")
    assert [turn.parent for turn in response.turns] == [None, 0, 0, None]
    assert [turn.reward for turn in response.turns] == [0.0, 1.0, 0.5, -0.5]


def test_plain_lines_and_boxes_have_each_turn() -> None:
    plain, boxes = io.StringIO(), io.StringIO()
    print_group(kept(), decode, Console(file=plain))
    print_group(kept(), decode, Console(file=boxes, force_terminal=True, width=120))
    text = plain.getvalue()
    head = text[text.index("---- ") :].splitlines()[0]
    assert "environment game | 4 turns in 3 branches | failed: game.py:7: KeyError: 'x'" in head
    first, second, third, last = text.split("-- turn ")[1:]
    assert "[environment] What is 2 + 3?" in first and f"[model] {CALL}" in first
    assert "[tool results] <tool_response>5</tool_response>" in second
    assert "What is 2 + 3?" not in second + third + last  # what a turn continues is not repeated
    assert "\n  [model] five" in third and "\n  [environment] A summary: 5." in last
    for part in ("-- turn 3", "[tool results]", "branches off behind turn 0"):
        assert part in boxes.getvalue()


def test_console_and_table_have_the_turns(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    folder.write(7, 0, 1, [kept()])
    shown = ConsoleSample(folder, decode, Due(1, 6))(7)
    assert shown.count("-- turn ") == 4 and "[model] It is 5." in shown
    (row,) = SampleTable(folder, decode, Due(1, 6))(7)
    cells = dict(zip(COLUMNS, row, strict=True))
    assert (cells["environment"], cells["turns"]) == ("game", 4)
    assert cells["failure"] == "game.py:7: KeyError: 'x'"
    assert cells["text"].count("-- turn ") == 4


def test_calls_are_found_in_both_ways_of_writing_them() -> None:
    assert [call.name for call in tool_calls(WORDS[11])] == ["add"]
    assert [call.arguments for call in tool_calls(WORDS[17])] == ['{"a": 2}']
    assert tool_calls(WORDS[18]) == tool_calls(WORDS[13]) == []


JSON = '{"name": "add", "parameters": {"a": 2}}'


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f" <|python_tag|> <|python_tag|>{JSON} <|eom_id|>\n</s> <|eot_id|></s>\n", 1),
        (f"{JSON}; {JSON}<|eot_id|>", 2),
        (f"{JSON}</s>|>", 0),
        (f"{JSON}<|a<b|>", 0),
        (f"{JSON}<|a|b|>", 0),
        (f"{JSON}<|>", 0),
        (f"{JSON}<||>", 1),
        (f"</s>{JSON}", 0),
        ("<|python_tag|>", 0),
        ("", 0),
    ],
)
def test_special_tokens_around_a_call_are_none_of_it(text: str, num_calls: int) -> None:
    assert len(tool_calls(text)) == num_calls


def test_special_tokens_are_taken_away_as_the_pattern_says_that_describes_them() -> None:
    """From all texts of up to five pieces, of which some only together make a special token."""
    ends = re.compile(r"\s*(<\|[^|<>]*\|>|</s>)\s*\Z|\A\s*(<\|python_tag\|>)")
    pieces = ("<|python_tag|>", "<|e|>", "</s>", " ", "x", "<|", "|>", "<", ">")
    for length in range(6):
        for text in map("".join, product(pieces, repeat=length)):
            before, after = None, text
            while before != after:
                before, after = after, ends.sub("", after)
            assert _without_special_ends(text).strip() == after.strip(), text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        JSON + "<|eot_id|>" * 20_000 + "no",
        JSON + "<|eot_id|></s>\n" * 20_000,
        "<|python_tag|> " * 20_000 + JSON,
        "x" + " " * 200_000 + "x",
        "<|" * 20_000 + "|>" * 20_000,
        "<" * 200_000 + "|>" + "</s>" * 20_000,
    ],
)
def test_what_a_model_repeats_is_read_in_one_pass(text: str) -> None:
    start_s = time.process_time()
    tool_calls(text)
    assert time.process_time() - start_s < 0.5
