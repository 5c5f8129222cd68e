"""Tool calls in sampled texts."""

import json
import re
import time
from itertools import product

import pytest

from easyrl.gateway.tool_calls import ToolCall, json_calls, parser_named, tagged_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    "text, rest, calls",
    [
        (CALL, "", [ADD]),
        (f"Now.\n{CALL}\n{CALL}", "Now.", [ADD, ADD]),
        (f"<think>{CALL}</think>no", f"<think>{CALL}</think>no", []),
        (f"<think>so</think>\n{CALL}", "<think>so</think>", [ADD]),
        (f"<think>{CALL}", f"<think>{CALL}", []),  # reasoning that has not ended
        ("plain", "plain", []),
        ('<tool_call>{"name": "add", "arguments": {"a": ', None, []),
        (f"{CALL}<tool_call>{{", None, []),  # one is whole, one is not
        (f"{CALL}<tool_call>oops</tool_call>", None, []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ],
)
def test_tagged_calls(text, rest, calls):
    assert tagged_calls(text, {"add"}) == (text if rest is None else rest, calls)


@pytest.mark.parametrize(
    "text, calls",
    [
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        (
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            [ADD, ADD],
        ),
        ('{"name": "other", "parameters": {}}', []),
        ('{"answer": 3}', []),
        ('{"name": "add", "parameters": {"a": 1}} as I said', []),
        ("", []),
        ("[" * 100_000, []),
    ],
)
def test_json_calls(text, calls):
    assert json_calls(text, {"add"}) == (("" if calls else text), calls)


def test_tags_are_found_as_the_pattern_says_that_describes_them():
    """All texts of up to six pieces, of which some only together make a tag."""
    pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    pieces = ("<tool_call>", "</tool_call>", '{"name": "f"}', "<tool_", "call>")
    for length in range(7):
        for text in map("".join, product(pieces, repeat=length)):
            inside, rest = pattern.findall(text), pattern.sub("", text)
            is_whole = inside and set(inside) == {'{"name": "f"}'} and "<tool_call>" not in rest
            expected = (rest, len(inside)) if is_whole else (text, 0)
            left, calls = tagged_calls(text, ())
            assert (left, len(calls)) == expected, text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>" * 20_000 + "</tool_call>",
        "<tool_call>x</tool_call>" * 20_000,
        "<tool_call>{" * 20_000,
        "</tool_call>" * 20_000,
        "<think>" * 20_000,
        "</think><tool_call>" * 20_000,
        '{"name": "add"};' * 20_000 + "no",
        '{"name": "add"}' + "; " * 200_000 + "no",
    ],
)
def test_what_a_model_repeats_is_parsed_in_one_pass(text):
    start_s = time.process_time()
    assert tagged_calls(text, {"add"})[1] == json_calls(text, {"add"})[1] == []
    assert time.process_time() - start_s < 0.5


def test_arguments_are_json_in_the_models_own_script():
    (call,) = tagged_calls('<tool_call>{"name": "f", "arguments": {"ü": [1]}}</tool_call>', ())[1]
    assert json.loads(call.arguments) == {"ü": [1]} and "ü" in call.arguments


@pytest.mark.parametrize(
    "template, parser",
    [
        ("uses <tool_call>", tagged_calls),
        ("Environment: ipython", json_calls),
        ("nothing at all", tagged_calls),
    ],
)
def test_auto_is_the_way_that_the_template_shows(template, parser):
    assert parser_named("auto", template) is parser


def test_an_unknown_parser_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="'xml'; there are auto, hermes, llama"):
        parser_named("xml", "")
