"""Tool calls in sampled texts."""

import json
import re
import time
from itertools import product
from typing import get_args

import pytest

from easyrl.config import ToolParserName
from easyrl.gateway.tool_parsers import PARSERS, ToolCall, chosen_parser
from easyrl.gateway.tool_parsers.hermes import hermes_calls
from easyrl.gateway.tool_parsers.llama3_json import llama3_json_calls
from easyrl.gateway.tool_parsers.mistral import mistral_calls
from easyrl.gateway.tool_parsers.pythonic import MOST_DEPTH, pythonic_calls
from easyrl.gateway.tool_parsers.qwen3_coder import qwen3_coder_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", '{"a": 1}')
TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "number"}}}}
NOTE = {"note": {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}


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
def test_hermes_calls(text, rest, calls):
    assert hermes_calls(text, TOOLS) == (text if rest is None else rest, calls)


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
def test_llama3_json_calls(text, calls):
    assert llama3_json_calls(text, TOOLS) == (("" if calls else text), calls)


def test_tags_are_found_as_the_pattern_says_that_describes_them():
    """All texts of up to six pieces, of which some only together make a tag."""
    pattern = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
    pieces = ("<tool_call>", "</tool_call>", '{"name": "f"}', "<tool_", "call>")
    for length in range(7):
        for text in map("".join, product(pieces, repeat=length)):
            inside, rest = pattern.findall(text), pattern.sub("", text)
            is_whole = inside and set(inside) == {'{"name": "f"}'} and "<tool_call>" not in rest
            expected = (rest, len(inside)) if is_whole else (text, 0)
            left, calls = hermes_calls(text, {})
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
    assert hermes_calls(text, TOOLS)[1] == llama3_json_calls(text, TOOLS)[1] == []
    assert time.process_time() - start_s < 0.5


def test_arguments_are_json_in_the_models_own_script():
    (call,) = hermes_calls('<tool_call>{"name": "f", "arguments": {"ü": [1]}}</tool_call>', {})[1]
    assert json.loads(call.arguments) == {"ü": [1]} and "ü" in call.arguments


@pytest.mark.parametrize(
    "text, rest, calls",
    [
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
        ('Now. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}] ', "Now.", [ADD]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', "", [ADD]),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 1}', "", [ADD, ADD]),
        ('So[TOOL_CALLS]add[CALL_ID]x12[ARGS]{"a": 1}', "So", [ADD]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a":', None, []),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, 3]', None, []),
        ("[TOOL_CALLS][]", None, []),
        ("[TOOL_CALLS]", None, []),
        ('add[ARGS]{"a": 1}', None, []),
        ("[TOOL_CALLS][ARGS]{}", None, []),
        ("plain", None, []),
    ],
)
def test_mistral_calls(text, rest, calls):
    assert mistral_calls(text, TOOLS) == (text if rest is None else rest, calls)


@pytest.mark.parametrize(
    "text, calls",
    [
        ("[add(a=1)]", [ADD]),
        (" [ add( a = 1 ), add(a=1,) ]\n", [ADD, ADD]),
        (
            "[add(a=[1, -2.5, {'b': None}], c='it\\'s', d=\"x\\n\", e=True, f={}, g=[])]",
            [
                ToolCall(
                    "add",
                    '{"a": [1, -2.5, {"b": null}], "c": "it\'s", "d": "x\\n", "e": true, "f": {}, '
                    '"g": []}',
                )
            ],
        ),
        ("[add()]", [ToolCall("add", "{}")]),
        ("[add(a=1)] as I said", []),
        ("[other(a=1)]", []),
        ("[add(1)]", []),
        ("[add(a=1, a=2)]", []),
        ("[add(a=b)]", []),
        ("[add(a=1+1)]", []),
        ("[add(a=__import__('os'))]", []),
        ("[add(a=1e999)]", []),
        ("[add(a=007)]", []),
        ("[add(a={1: 2})]", []),
        ("[add(a='\\ud800')]", []),
        ("[add(a='open)]", []),
        ("[add(a=" + "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1) + ")]", []),
        ("[]", []),
        ("[1, 2]", []),
        ("", []),
    ],
)
def test_pythonic_calls(text, calls):
    assert pythonic_calls(text, TOOLS) == (("" if calls else text), calls)


def coded(*parameters, name="note"):
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text, rest, calls",
    [
        (coded(("a", 1), name="add"), "", [ADD]),
        (f"So.\n{coded(('a', 1), name='add')}", "So.", [ADD]),
        (
            coded(("text", "12"), ("n", 12)),
            "",
            [ToolCall("note", '{"text": "12", "n": 12}')],  # as the schema says
        ),
        (coded(("n", "many")), "", [ToolCall("note", '{"n": "many"}')]),  # the tool says so
        (coded(("other", '[1, "x"]')), "", [ToolCall("note", '{"other": [1, "x"]}')]),
        (coded(("text", " two\nlines ")), "", [ToolCall("note", '{"text": " two\\nlines "}')]),
        (coded(), "", [ToolCall("note", "{}")]),
        (coded(("n", 1), ("n", 2)), None, []),
        (f"<think>{coded()}", None, []),
        (f"{coded()}<tool_call>", None, []),
        ("<tool_call><function=note></tool_call>", None, []),
        ("<tool_call><function=note>x</function></tool_call>", None, []),
        (CALL, None, []),
    ],
)
def test_qwen3_coder_calls(text, rest, calls):
    found = qwen3_coder_calls(text, TOOLS | NOTE)
    assert found == (text if rest is None else rest, calls)


@pytest.mark.parametrize(
    "template, name",
    [
        ("uses <tool_call>", "hermes"),
        ("uses <tool_call> <function=f> <parameter=p>", "qwen3_coder"),
        ("Environment: ipython", "llama3_json"),
        ("ipython ... [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("nothing at all, m.tool_calls", "hermes"),
        ("{% if tools %} their own way", None),
    ],
)
def test_auto_is_the_way_that_the_template_shows(template, name):
    chosen = chosen_parser("auto", template)
    assert (None if chosen is None else chosen.name) == name


def test_an_unknown_parser_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="'xml'; there are auto, hermes, llama3_json, mistral, "):
        chosen_parser("xml", "")
    assert {"auto", *PARSERS} == set(get_args(ToolParserName))


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]" * 20_000,
        "[TOOL_CALLS]add[ARGS]{" * 20_000,
        "[" * 100_000,
        "[add(a=" + "[" * 100_000,
        "[add(a=1)," * 20_000,
        "[add(a='" * 20_000,
        "[add(a=" + "9" * 100_000 + ")]",
        "<tool_call><function=add>" * 20_000,
        "<tool_call><function=add>" + "<parameter=a>" * 20_000,
        "<tool_call>" + "<function=add></function>" * 20_000 + "</tool_call>",
    ],
)
def test_whatever_is_repeated_no_parser_takes_long_or_fails(name, text):
    start_s = time.process_time()
    assert PARSERS[name].parse(text, TOOLS)[1] == []
    assert time.process_time() - start_s < 0.5
