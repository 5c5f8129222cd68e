"""Values that are drawn into a prompt's templates: which, where they are read, and by whom."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.dataset import PromptOrder, load_prompts
from easyrl.dataloaders.prompts.records import BadRecordError
from easyrl.dataloaders.prompts.template_values import (
    TemplatedPrompts,
    combinations,
    every_variant,
    filled,
)
from easyrl.schema import Prompt
from tests.tiny_tokenizer import tiny_tokenizer

TARGETS, MODES = [500, 1000, 2000], ["on", "off"]
SETTINGS = {
    "prompt_template": "{prompt}\nThink for {target_tokens} tokens.",
    "system_prompt": "detailed thinking {thinking}",
    "template_values": {"target_tokens": TARGETS, "thinking": MODES},
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def load(folder: Path, tokenizer, records: list[dict], seed: int = 0, **settings):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DatasetConfig(**{"files": [path], **SETTINGS, **settings})
    return load_prompts(config, tokenizer, seed=seed)


def questions(count: int) -> list[dict]:
    return [{"prompt": f"question {i}", "answer": str(i), "level": i % 3} for i in range(count)]


def values(prompt: Prompt) -> tuple[int, str]:
    return prompt.metadata["target_tokens"], prompt.metadata["thinking"]


def rendered(question: str, target: int, mode: str) -> str:
    """By hand: what ``tiny_tokenizer``'s chat template makes of both templates."""
    return (
        f"<|system|>detailed thinking {mode}<eos><|user|>{question}\n"
        f"Think for {target} tokens.<eos><|assistant|>"
    )


# ---- what a prompt is ----


def test_a_prompt_has_one_value_of_each_list_in_its_text_and_its_metadata(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, questions(20))
    assert len(prompts) == 20 and [prompt.index for prompt in prompts] == list(range(20))
    for prompt in prompts:
        target, mode = values(prompt)
        text = rendered(f"question {prompt.index}", target, mode)
        assert prompt.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prompt.system == f"detailed thinking {mode}"
        assert prompt.text == f"question {prompt.index}" and prompt.answer == str(prompt.index)
        assert prompt.metadata["level"] == prompt.index % 3


def test_every_combination_is_there_once(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, questions(2))
    found = [(prompt.index, *values(prompt)) for prompt in every_variant(prompts)]
    expected = [(i, target, mode) for i in range(2) for target in TARGETS for mode in MODES]
    assert found == expected
    assert list(combinations({})) == [{}]


def test_a_placeholder_in_a_question_stays(tmp_path, tokenizer):
    (prompt,) = load(tmp_path, tokenizer, [{"prompt": "{target_tokens} {x}", "answer": "1"}])
    target, mode = values(prompt)
    assert tokenizer.decode(prompt.token_ids) == rendered("{target_tokens} {x}", target, mode)


def test_other_braces_stay():
    template = r"\boxed{} \frac{1}{2} {prompt} {n} {n:d} {{n}}"
    assert filled(template, {"prompt": "{n}", "n": 3}) == r"\boxed{} \frac{1}{2} {n} 3 {n:d} {3}"


# ---- which values ----


def test_each_epoch_draws_anew_and_every_seed_differs(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, questions(60))
    of_epoch = [[values(prompts.in_epoch(i, epoch)) for i in range(60)] for epoch in range(3)]
    assert len({tuple(drawn) for drawn in of_epoch}) == 3
    assert [values(prompt) for prompt in prompts] == of_epoch[0]
    other = load(tmp_path, tokenizer, questions(60), seed=1)
    assert [values(prompt) for prompt in other] != of_epoch[0]
    again = load(tmp_path, tokenizer, questions(60))
    assert [[values(again.in_epoch(i, e)) for i in range(60)] for e in range(3)] == of_epoch


def test_all_values_are_drawn_alike_and_independently():
    choices = {"a": [1, 2, 3], "b": ["x", "y"]}
    variants = [[None] * 6 for _ in range(6000)]
    prompts = TemplatedPrompts(choices, variants, seed=0)
    drawn = Counter((prompts._draw("a", i, 0), prompts._draw("b", i, 0)) for i in range(6000))
    # 1000 each on average, with a deviation of sqrt(6000 · 1/6 · 5/6) = 29
    assert len(drawn) == 6 and all(abs(count - 1000) < 4 * 29 for count in drawn.values())


def test_more_values_of_one_placeholder_leave_the_other_ones_draws(tmp_path, tokenizer):
    first = load(tmp_path, tokenizer, questions(30))
    more = {"target_tokens": TARGETS, "thinking": [*MODES, "auto"]}
    second = load(tmp_path, tokenizer, questions(30), template_values=more)
    assert [values(p)[0] for p in first] == [values(p)[0] for p in second]


# ---- in a run's order ----


def order(prompts, seed: int = 0) -> PromptOrder:
    return PromptOrder(prompts, seed=seed, epochs=3)


def drawn(order: PromptOrder, first: int = 0) -> list[tuple]:
    count = order.num_left(first)
    found = [order.prompt(position) for position in range(first, first + count)]
    return [(p.key, *values(p), bytes(p.token_ids)) for p in found]


def test_a_resumed_run_draws_the_same(tmp_path, tokenizer):
    whole = order(load(tmp_path, tokenizer, questions(10)))
    cursor = json.loads(json.dumps(whole.cursor(13)))
    resumed = order(load(tmp_path, tokenizer, questions(10)))
    position = resumed.position(cursor)
    assert drawn(resumed, position) == drawn(whole)[13:]
    assert len({key for key, *_ in drawn(whole)}) == 30
    by_index = [{row[1:3] for row in drawn(whole) if row[0][1] == index} for index in range(10)]
    assert any(len(each) > 1 for each in by_index)  # not the same one in every epoch


def test_other_values_are_other_prompts(tmp_path, tokenizer):
    cursor = order(load(tmp_path, tokenizer, questions(4))).cursor(1)
    more = {"target_tokens": [*TARGETS, 4000], "thinking": MODES}
    other = order(load(tmp_path, tokenizer, questions(4), template_values=more))
    with pytest.raises(ValueError, match="cannot resume the prompts: dataset_hash was"):
        other.position(cursor)


def test_as_a_sequence_they_are_those_of_the_first_epoch(tmp_path, tokenizer):
    prompts = load(tmp_path, tokenizer, questions(7))
    assert [p.index for p in prompts[1::3]] == [1, 4]
    assert prompts[-1] is prompts[6] is prompts.in_epoch(6, 0)
    with pytest.raises(IndexError):
        prompts[7]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"template_values": {"thinking": MODES}, "system_prompt": None},
            "{thinking} is in neither",
        ),
        ({"template_values": {"n": []}}, "n has no values; give a list"),
        ({"template_values": {"n": 3}}, "n has no values; give a list"),
        ({"template_values": {"n": [True, False]}}, "n has the value True; .*YAML reads on, off"),
        ({"template_values": {"n": [None]}}, "n has the value None; give text or numbers"),
        ({"template_values": {"n": [1, "1"]}}, "n has a value twice"),
        ({"template_values": {"prompt": ["a"]}}, "'prompt' cannot be a placeholder"),
        ({"template_values": {"a b": ["a"]}}, "'a b' cannot be a placeholder"),
    ],
)
def test_values_that_cannot_be_used_are_refused(tmp_path, settings, message):
    with pytest.raises(ValidationError, match=message):
        DatasetConfig(**{"files": [tmp_path], **SETTINGS, **settings})


CHAT = [{"role": "user", "content": "hi"}]
WITH_SYSTEM = [{"role": "system", "content": "be brief"}, *CHAT]


def test_a_chat_reads_the_system_prompts_values(tmp_path, tokenizer):
    settings = {"template_values": {"thinking": MODES}}
    (prompt,) = load(tmp_path, tokenizer, [{"prompt": CHAT, "answer": "1"}], **settings)
    mode = prompt.metadata["thinking"]
    text = f"<|system|>detailed thinking {mode}<eos><|user|>hi<eos><|assistant|>"
    assert tokenizer.decode(prompt.token_ids) == text


def test_a_chats_own_system_message_is_the_prompts(tmp_path, tokenizer):
    settings = {"template_values": {}}
    (prompt,) = load(tmp_path, tokenizer, [{"prompt": WITH_SYSTEM, "answer": "1"}], **settings)
    assert prompt.system == "be brief"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": CHAT}, "the prompt is a chat, so that {target_tokens} of data.template_values"),
        (
            {"prompt": WITH_SYSTEM},
            "the prompt has a system message of its own, so that {target_tok",
        ),
        (
            {"prompt": "a", "thinking": "on"},
            "has a field 'thinking', which data.template_values dr",
        ),
    ],
)
def test_a_value_that_nobody_would_read_is_refused(tmp_path, tokenizer, record, message):
    with pytest.raises(BadRecordError, match=f"data.jsonl:1: .*{re.escape(message)}"):
        load(tmp_path, tokenizer, [{"answer": "1", **record}])


def test_the_longest_variant_decides_whether_a_prompt_fits(tmp_path, tokenizer):
    shortest, longest = (
        len(tokenizer(rendered("question 0", target, mode))["input_ids"])
        for target, mode in ((500, "on"), (2000, "off"))
    )
    assert longest == shortest + 2
    load(tmp_path, tokenizer, questions(1), max_prompt_tokens=longest, on_long_prompt="fail")
    with pytest.raises(BadRecordError, match=f"the prompt has {longest} tokens"):
        load(tmp_path, tokenizer, questions(1), max_prompt_tokens=shortest, on_long_prompt="fail")
