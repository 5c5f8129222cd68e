"""The demo's task, tokenizer and model: what is held out is never shown, what is shown is so."""

import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.demo.build_model import IGNORED, build_model, build_tokenizer, supervised_batches
from easyrl.demo.build_teacher import build_teacher
from easyrl.demo.task import (
    Problem,
    columns_response,
    draw_problems,
    estimate_response,
    split_operands,
    warm_start_examples,
    write_splits,
)

BATCH_SIZE = 16


def operands(prompt: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", prompt)]


def read_records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_carries(first: int, second: int) -> int:
    """Kummer: the digit sums of the summands exceed the sum's by nine for each carry."""
    digits = [sum(map(int, str(number))) for number in (first, second, first + second)]
    return (digits[0] + digits[1] - digits[2]) // 9


def test_splits_share_no_operand_and_every_answer_is_right(tmp_path):
    shown: dict[str, set[int]] = {}
    for seed in (0, 1):
        paths = write_splits(tmp_path / str(seed), seed, num_train=3000, num_heldout=600)
        for name, path, count in zip(("train", "heldout"), paths, (3000, 600), strict=True):
            records = read_records(path)
            assert len({record["prompt"] for record in records}) == count
            for record in records:
                numbers = operands(record["prompt"])
                assert len(numbers) == 2 and sum(numbers) == int(record["answer"])
                shown.setdefault(name, set()).update(numbers)
        examples = itertools.islice(warm_start_examples(seed), 3000)
        shown.setdefault("warm start", set()).update(
            number for question, _ in examples for number in operands(question)
        )
    # With other seeds too: a model built with one must not have seen what is held out with another.
    assert not shown["heldout"] & shown["train"]
    assert not shown["heldout"] & shown["warm start"]
    assert not shown["train"] & shown["warm start"]
    assert len(shown["heldout"]) == 200  # 1200 problems over 200 numbers meet them all

    division = split_operands()
    assert sorted(itertools.chain(*division)) == list(range(100, 1000))


def test_splits_depend_on_the_seed_only(tmp_path):
    first, again, other = (
        [path.read_text() for path in write_splits(tmp_path / name, seed, 50, 50)]
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


def test_more_problems_than_there_are_is_an_error():
    assert len(set(draw_problems((100, 200), 4, random.Random(0)))) == 4
    with pytest.raises(ValueError, match="5 different problems asked for, 2 numbers make 4"):
        draw_problems((100, 200), 5, random.Random(0))


@pytest.mark.parametrize("carries", [True, False])
def test_columns_are_sums_and_right_unless_a_carry_was_forgotten(carries):
    rng = random.Random(0)
    num_right = 0
    for _ in range(500):
        problem = Problem(rng.randrange(100, 1000), rng.randrange(100, 1000))
        response = columns_response(problem, carries)
        match = re.fullmatch(r"<think>(.*;.*;.*)</think>(\d+)", response)
        assert match
        for column in match[1].split(";"):
            terms, _, total = column.partition("=")
            assert sum(operands(terms)) == int(total)
        total = problem.first + problem.second
        # A carry out of the hundreds is written, not carried: the last column keeps its full sum.
        lost = num_carries(problem.first, problem.second) - (total >= 1000)
        right = match[2] == problem.answer
        assert right == (carries or lost == 0)
        num_right += right
    assert num_right == 500 if carries else 50 < num_right < 250


def test_examples_of_responses():
    problem = Problem(347, 586)
    assert columns_response(problem, carries=True) == "<think>7+6=13;4+8+1=13;3+5+1=9</think>933"
    assert columns_response(problem, carries=False) == "<think>7+6=13;4+8=12;3+5=8</think>823"
    assert estimate_response(problem) == "<think></think>930"
    assert estimate_response(Problem(100, 205)) == "<think></think>310"


def test_warm_start_shows_each_habit_as_often_as_asked():
    shown = warm_start_examples(0, estimate=0.5, careless=0.2)
    examples = list(itertools.islice(shown, 4000))
    estimates = sum("<think></think>" in response for _, response in examples)
    careful = sum(
        response == columns_response(Problem(*operands(question)), carries=True)
        and response != columns_response(Problem(*operands(question)), carries=False)
        for question, response in examples
    )
    # Four standard deviations of a binomial share over 4000 draws are 0.03; 70 % of sums carry.
    assert abs(estimates / 4000 - 0.5) < 0.03
    assert 0.3 * 0.6 < careful / 4000 < 0.3 * 0.8


@pytest.mark.parametrize("tied", [True, False])
def test_built_model_loads_and_its_tokenizer_round_trips(tmp_path, tied):
    build_model(tmp_path, seed=1, tied=tied, num_steps=30, batch_size=BATCH_SIZE)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>7+6=13;4+8+1=13;3+5+1=9</think>933"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.replace("<think>", "T").replace("</think>", "T"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer) < 64
    messages = [{"role": "user", "content": "347+586"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>347+586<|end|><|assistant|>"
    assert tokenizer.unk_token_id in tokenizer.encode("é", add_special_tokens=False)

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.dtype == torch.float32
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) != tied  # noqa: SIM118 (not a dict)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(inputs.input_ids, max_new_tokens=5)
    assert inputs.input_ids.shape[1] < output.shape[1] <= inputs.input_ids.shape[1] + 5


def test_warm_start_learns_and_repeats(tmp_path):
    for name, seed, steps in (("a", 0, 30), ("b", 0, 30), ("c", 1, 30), ("start", 0, 1)):
        build_model(tmp_path / name, seed=seed, num_steps=steps, batch_size=BATCH_SIZE)
    a, b, c, start = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("a", "b", "c", "start")
    )
    weights_a, weights_b, weights_c = a.state_dict(), b.state_dict(), c.state_dict()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    assert not all(torch.equal(weights_a[name], weights_c[name]) for name in weights_a)

    rows = next(supervised_batches(build_tokenizer(), warm_start_examples(99), BATCH_SIZE))[0]
    with torch.no_grad():
        before, after = (model(**rows).loss.item() for model in (start, a))
    assert before > math.log(build_tokenizer().vocab_size) * 0.7  # near the uniform distribution
    assert after < before * 0.7


def test_loss_is_on_responses_and_their_end_only():
    tokenizer = build_tokenizer()
    batch = next(supervised_batches(tokenizer, warm_start_examples(0), BATCH_SIZE))
    assert sum(len(rows["input_ids"]) for rows in batch) == BATCH_SIZE
    for rows in batch:
        for input_ids, labels in zip(*rows.values(), strict=True):
            trained = labels != IGNORED
            assert torch.equal(input_ids[trained], labels[trained])
            response = tokenizer.decode(labels[trained])
            assert re.fullmatch(r"<think>[\d+=;]*</think>\d+<\|end\|>", response)
            rest = tokenizer.decode(input_ids[~trained])
            assert re.fullmatch(r"<\|user\|>\d+\+\d+<\|end\|><\|assistant\|>(<\|pad\|>)*", rest)


def test_the_teacher_is_larger_of_another_family_and_has_the_same_tokens(tmp_path):
    build_teacher(tmp_path / "teacher", num_steps=2, batch_size=BATCH_SIZE)
    build_model(tmp_path / "model", num_steps=1, batch_size=BATCH_SIZE)
    teacher, model = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("teacher", "model")
    )
    assert teacher.config.model_type == "llama" and model.config.model_type == "qwen3"
    assert 2.5 * model.num_parameters() < teacher.num_parameters()
    own, its = (
        AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("model", "teacher")
    )
    assert own == its and teacher.config.vocab_size == model.config.vocab_size
