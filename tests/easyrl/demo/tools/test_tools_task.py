"""The demo with a tool: what its model is shown is what the tool loop and the gateway would do."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.config.file import load_config
from easyrl.demo.build_model import IGNORED
from easyrl.demo.tools.build_model import (
    build_model,
    build_tokenizer,
    conversation_batches,
    pieces_of,
)
from easyrl.demo.tools.task import (
    NO_TOOL,
    TOOL,
    Product,
    guess,
    right_call,
    tool_call,
    warm_start_examples,
    write_splits,
    wrong_operator,
    wrong_tool,
)
from easyrl.environments.client import ToolCall
from easyrl.environments.tool_sources import tools_of
from easyrl.environments.tools import Tools
from easyrl.gateway.prompts import template_continues
from easyrl.gateway.rendering import Renderer
from easyrl.gateway.tool_parsers import chosen_parser

ROOT = Path(__file__).parents[4]
CONFIG = Path("configs/demo_tools.yaml")
PRODUCT = Product(347, 586)
HABITS = (guess, wrong_operator, wrong_tool, right_call)


@pytest.fixture
async def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Those that the configuration names."""
    monkeypatch.chdir(ROOT)
    (environment,) = load_config(CONFIG).environments
    return Tools([tool for each in environment.tools for tool in await tools_of(each).open()])


@pytest.mark.parametrize("habit", HABITS)
async def test_a_conversation_is_what_gateway_and_tools_make_of_its_answers(habit, tools: Tools):
    """The texts of the warm start are written without the template, and results without a tool."""
    tokenizer, shown = build_tokenizer(), habit(PRODUCT)
    renderer = Renderer(tokenizer)
    parser = chosen_parser("auto", renderer.chat_template)
    assert parser is not None and parser.name == "hermes"
    chat = [{"role": "user", "content": shown.question}]
    text = renderer.text(chat, tools.schemas)
    for number, said in enumerate(shown.said):
        content, calls = parser.parse(said, {TOOL: {}})
        assert bool(calls) == (number < len(shown.results))
        text += f"{said}{tokenizer.eos_token}"
        message = {"role": "assistant", "content": content}
        if calls:
            (call,) = calls
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            result, is_error = await tools.answer(ToolCall("1", call.name, call.arguments))
            assert is_error == (habit is wrong_tool) and result == shown.results[number]
            chat += [message, {"role": "tool", "tool_call_id": "1", "content": result}]
            rendered = renderer.text(chat, tools.schemas)
            assert rendered.startswith(text)  # the template continues what was sampled
            text = rendered
        else:
            chat.append(message)
    assert renderer.text(chat, tools.schemas, generation_prompt=False) == text
    assert "".join(piece for piece, _ in pieces_of(shown)) == text


def test_the_template_continues_conversations():
    assert template_continues(Renderer(build_tokenizer())) is None


def test_examples_of_habits():
    assert guess(PRODUCT).said == ("150000",)
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "347*586"}}</tool_call>'
    assert right_call(PRODUCT).said == (call, "203342")
    assert wrong_operator(PRODUCT).said == (call.replace("*", "+"), "933")
    assert wrong_tool(PRODUCT).said == (call.replace(TOOL, NO_TOOL), "150000")


def test_the_warm_start_shows_each_habit_as_often_as_asked():
    examples = list(itertools.islice(warm_start_examples(0), 4000))
    kinds = {
        "guess": lambda shown: not shown.results,
        "wrong operator": lambda shown: shown.results and "+" in shown.said[0],
        "wrong tool": lambda shown: NO_TOOL in shown.said[0],
    }
    shares = {name: sum(map(bool, map(of, examples))) / 4000 for name, of in kinds.items()}
    # Four standard deviations of a binomial share over 4000 draws are 0.03.
    assert shares == pytest.approx(
        {"guess": 0.35, "wrong operator": 0.2, "wrong tool": 0.15}, abs=0.03
    )


def test_splits_share_no_operand_and_every_answer_is_right(tmp_path: Path):
    shown: dict[str, set[int]] = {}
    for path in write_splits(tmp_path, 0, num_train=2000, num_heldout=600):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            first, second = map(int, record["prompt"].split("*"))
            assert first * second == int(record["answer"])
            shown.setdefault(path.stem, set()).update((first, second))
    examples = itertools.islice(warm_start_examples(0), 3000)
    shown["warm start"] = {int(n) for each in examples for n in re.findall(r"\d+", each.question)}
    assert [len(numbers) for numbers in shown.values()] == [300, 200, 400]
    assert len(set.union(*shown.values())) == 900


def test_texts_round_trip_and_a_call_takes_few_tokens():
    tokenizer = build_tokenizer()
    call = tool_call(TOOL, PRODUCT.prompt)
    for text in (call, 'How many? Take 7 of 12 {or} "13"!\nDone.', "<think>no</think>1"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    longest = load_config(ROOT / CONFIG).rollout.max_tokens
    assert len(tokenizer.encode(call)) + 1 == 16 <= longest


def test_the_loss_is_on_what_the_model_said():
    tokenizer = build_tokenizer()
    batch = next(conversation_batches(tokenizer, warm_start_examples(0), 32))
    assert sum(len(rows["input_ids"]) for rows in batch) == 32
    for rows in batch:
        for input_ids, labels in zip(*rows.values(), strict=True):
            trained = labels != IGNORED
            assert torch.equal(input_ids[trained], labels[trained])
            call = r'(<tool_call>\{"name": "\w+", "arguments": \{.*\}\}</tool_call><\|end\|>)?'
            said = tokenizer.decode(labels[trained])
            assert re.fullmatch(rf"{call}\d+<\|end\|>", said), said
            rest = tokenizer.decode(input_ids[~trained])
            assert re.match(
                r"<\|system\|>calculate\(expression\)<\|end\|><\|user\|>\d+\*\d+<\|end\|>", rest
            )


def test_a_built_model_loads(tmp_path: Path):
    build_model(tmp_path, num_steps=2, batch_size=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) < 140
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_configuration_evaluates_the_episodes_that_it_trains():
    config = load_config(ROOT / CONFIG)
    assert config.evaluation is not None and not config.rewards
    assert config.evaluation.sampling.max_tokens == config.rollout.max_tokens
