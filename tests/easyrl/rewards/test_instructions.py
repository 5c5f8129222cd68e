"""Instruction checks: each with responses that follow it and that do not, and their scores."""

from __future__ import annotations

import time

import numpy as np
import pytest

from easyrl.config import ConfigError, RewardConfig
from easyrl.rewards.functions import check_prompts, check_rewards
from easyrl.rewards.instruction_checks import CHECKS, follows, sentences_of
from easyrl.rewards.instructions import instructions
from easyrl.schema import Prompt

LESS, AT_LEAST = {"relation": "less than"}, {"relation": "at least"}

# instruction, arguments, responses that follow it, responses that do not
CASES = [
    ("keywords:existence", {"keywords": ["cat", "c++"]}, ["Cats use C++."], ["cat", "a.c++", ""]),
    (
        "keywords:frequency",
        {"keyword": "the", "frequency": 2, **AT_LEAST},
        ["The cat, the dog", "thethe"],
        ["the cat"],
    ),
    (
        "keywords:frequency",
        {"keyword": "the", "frequency": 2, **LESS},
        ["the cat", "cat"],
        ["the the"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "c++"]},
        ["category", "a dog"],
        ["A CAT!", "use c++", "cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": "at least"},
        ["aAa"],
        ["aa", "bbb"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 1, "let_relation": "less than"},
        ["no"],
        ["no!"],
    ),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST}, ["a b c"], ["a b", "..."]),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, ["a, b."], ["a b c", "a-b-c"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, **AT_LEAST},
        ["One. Two!", "One?\nTwo", 'He said "no." Then left.'],
        ["One.", "It is 3.5 m", "Ask Dr. Who, e.g. now"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, **LESS},
        ["One.", "One..."],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a *** b *** c", "a\n***\n***\nb"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["One.\n\nThen, two.", "One.\n\n'then' two"],
        ["One.\n\nSo then", "Then", "a\n\nthen\n\nb"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] of [street]"],
        ["[name]", "name"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "bye\np. s. more"],
        ["Bye.", "ps more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["a\nP.P.S more", "a\nP. P. S more"],
        ["a\nP.S. more"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "text\n - a\n - b\nend"],
        ["* a", "* a\n* b\n* c", "**bold**\n* a"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is no."],
        ["No.", "my answer is no"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "*a* and **b**"],
        ["*a*", "a * b"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "SECTION 1 SECTION 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "```json\n[1, 2]\n```", "```\n3\n```"],
        ["{a: 1}", "here: {}", "```json\n{\n```"],
    ),
    ("detectable_format:title", {}, ["<<Joy>>\ntext"], ["<Joy>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "combination:two_responses",
        {},
        ["a******b", "a\n******\nb"],
        ["a", "a******a", "a******b******c", "a************b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "What is it?"},
        ["what is it? A cat."],
        ["A cat. What is it?"],
    ),
    ("startend:start_checker", {"starter": "I think"}, [" I think so"], ["So I think", "i think"]),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["Bye. any questions? ", '"Any questions?"'],
        ["Any questions? No."],
    ),
    ("startend:quotation", {}, ['"a"', ' "a" '], ['"a', 'a"', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["YES we CAN"],
        ["YES We can", "yes"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["Yes"],
        ["YES"],
    ),
    ("change_case:english_capital", {}, ["YES, 1."], ["Yes", "1"]),
    ("change_case:english_lowercase", {}, ["yes, 1."], ["Yes", "1"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "arguments", "following", "others"), CASES)
def test_what_follows_an_instruction_and_what_does_not(name, arguments, following, others):
    assert [text for text in following if not follows(name, text, arguments)] == []
    assert [text for text in others if follows(name, text, arguments)] == []
    assert not follows(name, " \n", arguments)


@pytest.mark.parametrize(
    "piece", ["[", "<", "*", ".", "\n", " ", '"', "-", "{", "*a", "<<\n", ". "]
)
def test_no_text_takes_long(piece):
    """Patterns whose time grew with the square would take minutes here."""
    start_s = time.process_time()
    for name, arguments, *_ in CASES:
        follows(name, f"a{piece * (200_000 // len(piece))}b", arguments)
    assert time.process_time() - start_s < 10.0


def test_every_check_has_a_case():
    assert {name for name, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ("Mr. Fox paid 3.50 (i.e. too much).", ["Mr. Fox paid 3.50 (i.e. too much)."]),
        ("He asked 'why?' twice... So", ["He asked 'why?'", "twice...", "So"]),
        ("你好。再见！", ["你好。", "再见！"]),
        ("...", []),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert sentences_of(text) == expected


# ---- the reward ----


def prompt(names: object = None, given: object = None) -> Prompt:
    metadata = {"instruction_id_list": names, "kwargs": given}
    return Prompt(0, np.zeros(1, np.int32), "q", None, 0, metadata, "if.jsonl:1")


TWO = prompt(
    ["punctuation:no_comma", "length_constraints:number_words"],
    # as a table has it: every argument of any instruction, null where it is another's; 3 as 3.0
    [
        {"num_words": None, "relation": None},
        {"num_words": 3.0, "relation": "at least", "keyword": None},
    ],
)


def test_all_or_the_share_is_scored():
    texts = ["a b c", "a, b, c", "a b", "a, b", ""]
    assert instructions(TWO, texts, []) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert instructions(TWO, texts, [], score="fraction") == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_thoughts_are_not_read():
    texts = ["<think>a, b</think>a b c", "<think>a b c</think>a", "<think>a b c</think>"]
    assert instructions(TWO, texts, [], score="fraction") == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (prompt(), "'instruction_id_list' of the prompt is None; it must be a list of ids"),
        (prompt([], []), r"'instruction_id_list' of the prompt is \[\]"),
        (prompt(["punctuation:no_comma"]), "'kwargs' of the prompt is None; .*each of the 1"),
        (prompt(["punctuation:no_comma"], [{}, {}]), "'kwargs' of the prompt is .*each of the 1"),
        (prompt(["punctuation:no_comma"], [3]), "'kwargs' of the prompt has 3; it must be a map"),
        (prompt(["punctuation:none"], [{}]), "'punctuation:none' in .* cannot be checked; leave"),
        (
            prompt(["language:response_language"], [{"language": "de"}]),
            r"cannot be checked \(no language detector is used\)",
        ),
        (
            prompt(["length_constraints:number_words"], [{"num_words": 3}]),
            r"kwargs\[0\], of length_constraints:number_words: relation: is required; add it",
        ),
        (
            prompt(["length_constraints:number_words"], [{"num_words": 3, "relation": "more"}]),
            r"relation: Input should be 'less than' or 'at least' \(got 'more'\)",
        ),
        (
            prompt(["punctuation:no_comma"], [{"num_words": 3}]),
            r"kwargs\[0\], of punctuation:no_comma: num_words: unknown; there are none",
        ),
        (
            prompt(["keywords:existence"], [{"keywords": "cat"}]),
            "keywords: Input should be a valid list",
        ),
    ],
)
def test_a_record_that_cannot_be_checked_is_found_at_the_start(asked, message):
    rewards = [RewardConfig(name="instructions")]
    check_prompts(rewards, [TWO])
    start = r"rewards\[0\]: instructions cannot score if.jsonl:1: "
    with pytest.raises(ConfigError, match=f"{start}.*{message}"):
        check_prompts(rewards, [TWO, asked])


def test_kwargs_are_checked():
    check_rewards([RewardConfig(name="instructions", kwargs={"score": "fraction"})])
    with pytest.raises(ConfigError, match="score: Input should be 'all' or 'fraction'"):
        check_rewards([RewardConfig(name="instructions", kwargs={"score": "loose"})])
