"""Reward functions in the forms that users have them in, and how each is called where it is from.

``SOURCE`` is the text of a user's file or script. ``direct`` calls one of its functions by hand, as
EasyRL, TRL's trainer or verl's reward managers do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easyrl.schema import Prompt

SOURCE = """
import asyncio


def ours(prompt, texts, token_ids):
    return [float(prompt.answer in text) + prompt.metadata["level"] for text in texts]


async def ours_async(prompt, texts, token_ids):
    await asyncio.sleep(0.001)
    return [float(len(ids)) for ids in token_ids]


def ours_by_position(asked, said, ids):
    return [len(text) / 10 for text in said]


def ours_with_kwargs(prompt, texts, token_ids, *, bonus):
    return [len(text) + bonus for text in texts]


def trl_short(completions, **kwargs):
    return [-len(completion) / 8 for completion in completions]


def trl_prompts(prompts, completions, **kwargs):
    return [float(prompt in said) for prompt, said in zip(prompts, completions, strict=True)]


def trl_column(completions, answer, **kwargs):
    pairs = zip(completions, answer, strict=True)
    return [float(said.endswith(str(right))) for said, right in pairs]


def trl_any_column(prompts, completions, **kwargs):
    return [level + len(kwargs["data_source"][0]) for level in kwargs["level"]]


def trl_token_ids(prompts, completions, completion_ids, **kwargs):
    assert all(isinstance(ids, list) and isinstance(ids[0], int) for ids in completion_ids)
    return [float(sum(ids)) for ids in completion_ids]


def trl_only_token_ids(completion_ids, **kwargs):
    return [1.0 / len(ids) for ids in completion_ids]


def trl_named_only(completions, level, answer):
    return [one + len(said) for one, said in zip(level, completions, strict=True)]


async def trl_async(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(said.count("7")) for said in completions]


def trl_of_some(completions, answer, **kwargs):
    return [1.0 if str(answer[0]) in said else None for said in completions]


def trl_of_none(completions, **kwargs):
    return None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["split"] == "train" and extra_info["level"] > 0
    return float(solution_str.endswith(str(ground_truth))) + len(data_source) / 100


def verl_parts(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    right = str(ground_truth) in solution_str
    return {"score": 2.0 * right - 1, "acc": right, "pred": solution_str[-2:]}


def verl_without_some(solution_str, ground_truth):
    return len(solution_str) - len(str(ground_truth))


def verl_with_kwargs(data_source, solution_str, ground_truth, extra_info, scale):
    return scale * len(solution_str)


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return {"score": float(len(solution_str)), "index": extra_info["index"]}


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(said) + len(str(right)) for said, right in zip(solution_strs, ground_truths)]


class Judge:
    def __init__(self, word):
        self.word = word

    def __call__(self, prompts, completions, **kwargs):
        return [float(self.word in said) for said in completions]


trl_object = Judge("so")
"""

# what is given as kwargs, by function
KWARGS: dict[str, dict[str, Any]] = {
    "ours_with_kwargs": {"bonus": 0.5},
    "verl_with_kwargs": {"scale": 3},
}


@dataclass(frozen=True)
class Responses:
    """What a model has said on a record of a data set."""

    record: Mapping[str, Any]
    asked: Prompt  # the record, as EasyRL has it
    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]

    @property
    def extra(self) -> dict[str, Any]:
        """verl's ``extra_info``, to which the record's other columns come."""
        return {**self.record["extra_info"], "level": self.record["level"]}


def by_hand_ours(function: Callable[..., Any], said: Responses, **kwargs: Any) -> Any:
    token_ids = [np.array(ids, np.int32) for ids in said.token_ids]
    return function(said.asked, said.texts, token_ids, **kwargs)


def by_hand_trl(function: Callable[..., Any], said: Responses) -> Any:
    """As its trainer does it: by keyword, a list for each column."""
    given: dict[str, Any] = {
        "prompts": [said.record["prompt"]] * len(said.texts),
        "completions": said.texts,
        "completion_ids": said.token_ids,
        **{
            column: [said.record[column]] * len(said.texts)
            for column in ("answer", "level", "data_source", "extra_info")
        },
    }
    if getattr(function, "__name__", "") == "trl_named_only":  # TRL would ask for **kwargs
        given = {name: given[name] for name in ("completions", "level", "answer")}
    return function(**given)


def by_hand_verl(function: Callable[..., Any], said: Responses, **kwargs: Any) -> Any:
    """As its reward manager does it: by keyword, for each response."""
    own = {"ground_truth": said.record["answer"]}
    if function.__name__ != "verl_without_some":
        own |= {"data_source": said.record["data_source"], "extra_info": said.extra, **kwargs}
    values = [function(solution_str=text, **own) for text in said.texts]
    return [asyncio.run(each) if inspect.iscoroutine(each) else each for each in values]


def by_hand_verl_batch(function: Callable[..., Any], said: Responses) -> Any:
    num = len(said.texts)
    return function(
        data_sources=[said.record["data_source"]] * num,
        solution_strs=said.texts,
        ground_truths=[said.record["answer"]] * num,
        extra_infos=[said.extra] * num,
    )


FORMS: dict[str, Callable[..., Any]] = {
    "ours": by_hand_ours,
    "ours_async": by_hand_ours,
    "ours_by_position": by_hand_ours,
    "ours_with_kwargs": by_hand_ours,
    "trl_short": by_hand_trl,
    "trl_prompts": by_hand_trl,
    "trl_column": by_hand_trl,
    "trl_any_column": by_hand_trl,
    "trl_token_ids": by_hand_trl,
    "trl_only_token_ids": by_hand_trl,
    "trl_named_only": by_hand_trl,
    "trl_async": by_hand_trl,
    "trl_of_some": by_hand_trl,
    "trl_of_none": by_hand_trl,
    "trl_object": by_hand_trl,
    "compute_score": by_hand_verl,
    "verl_parts": by_hand_verl,
    "verl_without_some": by_hand_verl,
    "verl_with_kwargs": by_hand_verl,
    "verl_async": by_hand_verl,
    "verl_batch": by_hand_verl_batch,
}


def script() -> dict[str, Any]:
    """The names that a script defines which has ``SOURCE`` as its text."""
    defined: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, defined)
    return defined


def direct(name: str, said: Responses) -> Any:
    """What the function ``name`` returns when it is called by hand."""
    result = FORMS[name](script()[name], said, **KWARGS.get(name, {}))
    return asyncio.run(result) if inspect.iscoroutine(result) else result
