"""Reward functions as they are written for TRL, for verl and for us: recognised, and called alike.

Each form is called by hand, as where it comes from, and by worker processes: from a file that a
configuration names, and as an object of a script, pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.config import ConfigError, DatasetConfig, RewardConfig
from easyrl.config.file import load_config
from easyrl.dataloaders.prompts.dataset import load_prompts
from easyrl.rewards import worker
from easyrl.rewards.functions import check_prompts, check_rewards, validated
from easyrl.rewards.given import GivenRewards
from easyrl.rewards.signatures import adapted, form_of
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.workers.worker_pool import WorkerPool
from easyrl.schema import Prompt
from tests.easyrl.rewards.reward_forms import FORMS, KWARGS, SOURCE, Responses, direct, script
from tests.tiny_tokenizer import tiny_tokenizer

RECORD = {
    "prompt": "3 + 4 =",
    "answer": 7,
    "level": 3,
    "data_source": "sums",
    "extra_info": {"split": "train", "index": 12},
}
CHAT = RECORD | {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4 ="}]
}
TEXTS = ["3 + 4 = 7", "so 8"]


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


# by name: what it gives for ``TEXTS``
EXPECTED: dict[str, list[Any]] = {
    "ours": [4.0, 3.0],
    "ours_async": [9.0, 4.0],
    "ours_by_position": [0.9, 0.4],
    "ours_with_kwargs": [9.5, 4.5],
    "trl_short": [-1.125, -0.5],
    "trl_prompts": [1.0, 0.0],
    "trl_column": [1.0, 0.0],
    "trl_any_column": [7.0, 7.0],
    "trl_token_ids": [float(sum(ids_of(text))) for text in TEXTS],
    "trl_only_token_ids": [1 / 9, 0.25],
    "trl_named_only": [12.0, 7.0],
    "trl_async": [1.0, 0.0],
    "trl_of_some": [1.0, None],
    "trl_of_none": [None, None],
    "trl_object": [0.0, 1.0],
    "compute_score": [1.04, 0.04],
    "verl_parts": [{"score": 1.0, "acc": 1.0}, {"score": -1.0, "acc": 0.0}],
    "verl_without_some": [8.0, 3.0],
    "verl_with_kwargs": [27.0, 12.0],
    "verl_async": [{"score": 9.0, "index": 12.0}, {"score": 4.0, "index": 12.0}],
    "verl_batch": [10.0, 5.0],
}


def read(folder: Path, record: dict[str, Any], **settings: Any) -> Prompt:
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (asked,) = load_prompts(DatasetConfig(files=[file], **settings), tiny_tokenizer())
    return asked


Called = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def called(tmp_path_factory) -> Iterator[Called]:
    """What a worker process says, of a function from a file and from a script."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "forms.py").write_text(SOURCE)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    sections = [
        {"file": str(folder / "forms.py"), "function": n, "kwargs": KWARGS.get(n, {})}
        for n in FORMS
    ]
    config = folder / "config.yaml"
    config.write_text(
        "model: {path: models/tiny}\ndata: {files: [train.jsonl]}\n"
        'inference: {endpoints: ["http://127.0.0.1:8000"]}\n'
        f"rewards: {json.dumps(sections)}\n"  # which is YAML, too
    )
    of_file = load_config(config).rewards
    given = GivenRewards.of([script()[name] for name in FORMS], folder, "0")
    given.write()
    of_script = [
        RewardConfig(file=Path(each["file"]), kwargs=KWARGS.get(name, {}))
        for name, each in zip(FORMS, given.sections, strict=True)
    ]
    assert all(reward.is_pickled for reward in of_script)
    rewards = [*of_file, *of_script]
    check_rewards(rewards)
    given.check(of_script)
    asked = read(folder, RECORD)
    token_ids = [np.array(ids_of(text), np.int32) for text in TEXTS]
    with LoopThread() as thread:
        workers = WorkerPool(1, worker.initialize, (rewards, folder / "tokenizer"))
        thread.run(workers.start())

        def call(name: str, source: str) -> Any:
            index = list(FORMS).index(name) + len(FORMS) * (source == "script")
            return thread.run(
                workers.call(worker.score_reward, index, asked, token_ids, timeout_s=30)
            )

        yield call
        thread.run(workers.close())


@pytest.mark.parametrize("source", ["file", "script"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_gives_what_it_gives_where_it_comes_from(called, tmp_path, name, source):
    asked = read(tmp_path, RECORD)
    by_hand = direct(name, Responses(RECORD, asked, TEXTS, [ids_of(text) for text in TEXTS]))
    said = called(name, source)
    assert said == validated(by_hand, 2)
    assert said == EXPECTED[name]


# ---- what a form is recognised by ----------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_recognised(name):
    own = {"ours": "easyrl", "trl": "trl", "verl": "verl", "compute": "verl"}
    assert form_of(script()[name]) == own[name.partition("_")[0]]


AMBIGUOUS = {
    "(prompt, completions, token_ids)": "names of easyrl and trl",
    "(prompts, texts, token_ids)": "names of easyrl and trl",
    "(completions, solution_str, **kwargs)": "names of trl and verl",
    "(prompt, solution_str, ground_truth)": "names of easyrl and verl",
    "(prompt, response, ground_truth)": "ground_truth is verl's",
    "(data_source, response, truth)": "data_source is verl's",
    "(**kwargs)": "which any call fits",
    "(*args, **kwargs)": "which any call fits",
}


def written(folder: Path, arguments: str, name: str = "mine", **settings: Any) -> RewardConfig:
    file = folder / f"{name}.py"
    file.write_text(f"def {name}{arguments}:\n    return [0.5, 0.25]\n")
    return RewardConfig(file=file, function=name, **settings)


@pytest.mark.parametrize("arguments", AMBIGUOUS)
def test_an_ambiguous_one_is_refused_and_says_how_to_declare_it(tmp_path, arguments):
    message = r"rewards\[0\]\.signature: mine takes .*" + AMBIGUOUS[arguments] + "; set signature"
    with pytest.raises(ConfigError, match=message) as caught:
        check_rewards([written(tmp_path, arguments)])
    assert str(caught.value).endswith("to the one that is meant: easyrl, trl or verl")


@pytest.mark.parametrize(
    ("arguments", "signature"),
    [
        ("(prompt, completions, token_ids)", "easyrl"),
        ("(completions, solution_str='', **kwargs)", "trl"),
        ("(*args, **kwargs)", "easyrl"),
        ("(*args, **kwargs)", "trl"),
    ],
)
def test_a_declared_one_is_called_so(tmp_path, arguments, signature):
    reward = written(tmp_path, arguments, signature=signature)
    check_rewards([reward])
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    worker.initialize([reward], tmp_path / "tokenizer")
    token_ids = [np.array(ids_of(text), np.int32) for text in TEXTS]
    assert worker.score_reward(0, read(tmp_path, RECORD), token_ids) == [0.5, 0.25]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ("(prompt, texts)", {}, "function: .*called with .prompt, texts, token_ids.: too many"),
        ("(solution_str, judge)", {}, "function: .*called with .data_source=.*argument: 'judge'"),
        ("(completions)", {"kwargs": {"n": 1}}, r"kwargs: .*columns, n\): got an unexp.*'n'"),
        ("(completions, /, **kwargs)", {}, "function: .*'completions' cannot be given by name"),
        ("(prompt, texts, ids)", {"signature": "verl"}, "function: .*required argument: 'prompt'"),
    ],
)
def test_one_that_cannot_be_called_is_refused(tmp_path, arguments, settings, message):
    with pytest.raises(ConfigError, match=rf"rewards\[0\]\.{message}"):
        check_rewards([written(tmp_path, arguments, **settings)])


def test_a_built_in_one_has_no_signature_to_declare():
    with pytest.raises(ValueError, match="signature: is for a function of a file"):
        RewardConfig(name="exact", signature="trl")


# ---- what of a record they are given -------------------------------------------------------------


def given_by(form: str, function: Callable[..., Any], asked: Prompt, **kwargs: Any) -> Any:
    token_ids = [np.array(ids_of(text), np.int32) for text in TEXTS]
    return adapted(function, form, kwargs)(asked, TEXTS, token_ids)  # type: ignore[arg-type]


def test_a_chat_is_given_to_trls_as_messages(tmp_path):
    def trl(prompts, completions, **columns):
        assert prompts == [CHAT["prompt"]] * 2
        assert "prompt" not in columns
        return [said[0]["content"] + said[0]["role"] for said in completions]

    said = given_by("trl", trl, read(tmp_path, CHAT))
    assert said == ["3 + 4 = 7assistant", "so 8assistant"]


def test_a_chat_is_given_to_verls_as_text(tmp_path):
    said = given_by("verl", lambda solution_str: solution_str, read(tmp_path, CHAT))
    assert said == TEXTS


@pytest.mark.parametrize(
    ("settings", "answer", "columns"),
    [
        ({}, 7, {"answer": 7}),
        ({"fields": {"answer": "level"}}, 3, {"level": 3, "answer": 7}),
        ({"fields": {"answer": "extra_info.split"}}, "train", {"split": "train", "answer": 7}),
        ({"fields": {"answer": None}}, None, {"answer": 7}),
        ({"answer_pattern": "([0-9])"}, "7", {"answer": "7"}),
    ],
)
def test_the_answer_is_a_column_by_its_own_name(tmp_path, settings, answer, columns):
    asked = read(tmp_path, RECORD, **settings)
    kept: dict[str, Any] = {}

    def trl(completions, **given):
        kept.update({name: value[0] for name, value in given.items()})

    given_by("trl", trl, asked)
    assert {name: kept[name] for name in columns} == columns
    if answer is not None:
        assert (
            given_by("verl", lambda solution_str, ground_truth: ground_truth, asked) == [answer] * 2
        )


def test_verls_own_records(tmp_path):
    """Their ground truth lies in ``reward_model``."""
    record = {
        "prompt": [{"role": "user", "content": "3 + 4 ="}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 5},
    }

    def score(data_source, solution_str, ground_truth, extra_info):
        return [data_source, ground_truth, extra_info["index"]]

    for field in (None, "reward_model.ground_truth"):
        asked = read(tmp_path, record, fields={"answer": field})
        assert given_by("verl", score, asked) == [["sums", "7", 5]] * 2


@pytest.mark.parametrize(
    ("form", "function", "message"),
    [
        (
            "trl",
            lambda completions, difficulty, **kw: [],
            "takes 'difficulty', which the record does",
        ),
        (
            "verl",
            lambda solution_str, ground_truth: 0,
            "'ground_truth', .* as data.fields.answer or",
        ),
    ],
)
def test_what_the_record_lacks_is_named(tmp_path, form, function, message):
    record = {"prompt": "3 + 4 =", "level": 3}
    asked = read(tmp_path, record, fields={"answer": None})
    with pytest.raises(ValueError, match=rf"{message}(?s:.)*") as caught:
        given_by(form, function, asked)
    assert "beside its prompt: level)" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "settings", "lacks"),
    [
        ("(completions, level, **kwargs)", {}, "'level'"),
        ("(solution_str, level)", {"kwargs": {"level": 3}}, None),
        ("(completions, level, **kwargs)", {"kwargs": {"level": 3}}, None),
        ("(completions, level=0, **kwargs)", {}, None),
        ("(data_source, solution_str, ground_truth, extra_info)", {}, "'ground_truth'"),
        ("(data_sources, solution_strs, ground_truths, extra_infos)", {}, "'ground_truths'"),
        ("(data_source, solution_str, ground_truth=None)", {}, None),
        ("(prompt, texts, level)", {}, None),
    ],
)
def test_all_prompts_are_looked_at_for_what_a_function_takes(tmp_path, arguments, settings, lacks):
    first = read(tmp_path, RECORD)
    second = Prompt(1, first.token_ids, "1 =", None, location="p.jsonl:2")
    rewards = [written(tmp_path, arguments, **settings)]
    check_rewards(rewards)
    check_prompts(rewards, [first])
    if lacks is None:
        check_prompts(rewards, [first, second])
        return
    message = rf"rewards\[0\]: mine cannot score p.jsonl:2: takes {lacks}, which the record does"
    with pytest.raises(ConfigError, match=message):
        check_prompts(rewards, [first, second])


def test_kwargs_go_before_columns(tmp_path):
    def trl(completions, level, **columns):
        return [level] * 2

    assert given_by("trl", trl, read(tmp_path, RECORD), level=9) == [9, 9]


def test_a_partial_is_as_its_function(tmp_path):
    bound = partial(script()["verl_with_kwargs"], scale=2)
    assert form_of(bound) == "verl"
    assert given_by("verl", bound, read(tmp_path, RECORD)) == [18, 8]


# ---- what they return ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([{"acc": 1.0}, 1.0], "returned {'acc': 1.0} for response 0; expected a 'score' among"),
        ([1.0, {"score": float("nan")}], "returned nan as 'score' for response 1; expected a fin"),
        ([{"score": 1, "n": float("inf")}, 0], "returned inf as 'n' for response 0; expected a"),
        ([{"score": "1"}, 0], "returned '1' as 'score' for response 0; expected a finite number"),
        ({"score": 1.0}, "returned {'score': 1.0}; expected a list of 2 numbers"),
        ([None], "returned 1 rewards for 2 responses"),
    ],
)
def test_what_is_no_reward_is_an_error(result, message):
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        validated(result, 2)
