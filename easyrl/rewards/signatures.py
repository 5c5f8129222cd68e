"""Signatures of reward functions: EasyRL's, TRL's and verl's, recognised and called as one.

A function is called as it would be where it comes from:

- ``easyrl``: ``f(prompt, texts, token_ids)``, once for all responses, by position;
- ``trl``: ``f(prompts=…, completions=…, completion_ids=…, **columns)``, once for all responses, a
  list of as many entries for each; a function without ``**kwargs`` is given what it names;
- ``verl``: ``f(data_source=…, solution_str=…, ground_truth=…, extra_info=…)`` for each response, or
  with these names in the plural once for all.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Literal

import numpy as np

from easyrl.schema import Prompt

RewardFunction = Callable[..., Any]
# (prompt, texts, token_ids) → what ``functions.validated`` takes, or an awaitable of it
GroupReward = Callable[[Prompt, Sequence[str], Sequence[np.ndarray]], Any]
Form = Literal["easyrl", "trl", "verl"]

OF_EASYRL = ("prompt", "texts", "token_ids")
OF_TRL = ("prompts", "completions", "completion_ids")
OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OF_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
DECISIVE = {
    "easyrl": OF_EASYRL,
    "trl": OF_TRL,
    "verl": (OF_VERL[1], OF_VERL_BATCH[1]),  # the others may be columns of TRL's
}
CALLED = {
    "easyrl": "(prompt, texts, token_ids)",
    "trl": "(prompts=, completions=, completion_ids=, and the record's columns)",
    "verl": "(data_source=, solution_str=, ground_truth=, extra_info=)",
}
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
DECLARE = "set signature to the one that is meant: easyrl, trl or verl"


def form_of(function: RewardFunction, declared: str = "auto") -> Form:
    """The form of ``function``, by the names of its arguments unless it is ``declared``.

    Raises ``ValueError`` where several fit.
    """
    if declared in ("easyrl", "trl", "verl"):
        return declared  # type: ignore[return-value]
    signature = _signature(function)
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (*BY_POSITION, Parameter.KEYWORD_ONLY)]
    first = [p.name for p in parameters if p.kind in BY_POSITION][:3]
    forms: list[Form] = []
    if set(first) & set(OF_EASYRL):
        forms.append("easyrl")
    forms += [form for form in ("trl", "verl") if set(named) & set(DECISIVE[form])]
    if len(forms) > 1:
        raise ValueError(f"takes {signature}, names of {' and '.join(forms)}; {DECLARE}")
    if forms in (["trl"], ["verl"]):
        return forms[0]
    # what only verl calls so would be handed texts or token ids in its place
    if strange := [name for name in first if name in (*OF_VERL, *OF_VERL_BATCH)]:
        raise ValueError(f"takes {signature}, and {strange[0]} is verl's; {DECLARE}")
    if not first and any(p.kind == Parameter.VAR_KEYWORD for p in parameters):
        raise ValueError(f"takes {signature}, which any call fits; {DECLARE}")
    return "easyrl"  # alone called by position, so that names do not matter


def why_not(function: RewardFunction, form: Form, keywords: Mapping[str, Any]) -> str | None:
    """Why ``function`` cannot be called as ``form``, as far as is known without a record."""
    signature = _signature(function)
    parameters = signature.parameters
    if form == "easyrl":
        try:
            signature.bind(None, [], [], **keywords)
        except TypeError as error:
            return str(error)
        return None
    if only := [
        p.name
        for p in parameters.values()
        if p.kind == Parameter.POSITIONAL_ONLY and p.default is Parameter.empty
    ]:
        return f"{only[0]!r} cannot be given by name"
    if not _takes_any(signature) and (unknown := sorted(keywords.keys() - parameters.keys())):
        return f"got an unexpected keyword argument {unknown[0]!r}"
    if form == "verl":
        names = OF_VERL_BATCH if _is_batch(signature) else OF_VERL
        if missing := _missing(signature, {*names, *keywords}):
            return f"missing a required argument: {missing[0]!r}"
    return None


def adapted(function: RewardFunction, form: Form, keywords: Mapping[str, Any]) -> GroupReward:
    """``function`` as one that is called with a prompt and all its responses.

    What it returns may be awaitable. Raises ``ValueError`` where the record lacks what it takes.
    """
    if form == "easyrl":
        return lambda prompt, texts, token_ids: function(prompt, texts, token_ids, **keywords)
    signature = _signature(function)

    def trl(prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]) -> Any:
        num = len(texts)
        given = {name: [value] * num for name, value in columns(prompt).items()} | {
            "prompts": [prompt.text if prompt.messages is None else list(prompt.messages)] * num,
            "completions": list(texts),
            "completion_ids": [ids.tolist() for ids in token_ids],
        }
        if prompt.messages is not None:
            given["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        return function(**_taken(signature, given | dict(keywords), prompt))

    def verl(prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray]) -> Any:
        own = _of_verl(prompt)
        if _is_batch(signature):
            lists = {f"{name}s": [value] * len(texts) for name, value in own.items()}
            given = lists | {"solution_strs": list(texts)} | dict(keywords)
            return function(**_taken(signature, given, prompt))
        said = [
            function(**_taken(signature, own | {"solution_str": text} | dict(keywords), prompt))
            for text in texts
        ]
        return _all_of(said) if any(map(inspect.isawaitable, said)) else said

    return trl if form == "trl" else verl


def require_columns(
    function: RewardFunction, form: Form, keywords: Mapping[str, Any], prompt: Prompt
) -> None:
    """Raises ``ValueError`` where the record lacks what ``function`` takes, without a call."""
    if form == "easyrl":
        return
    signature = _signature(function)
    names = [*OF_TRL, *columns(prompt)]
    if form == "verl":
        own = _of_verl(prompt)
        names = [OF_VERL[1], *own, OF_VERL_BATCH[1], *(f"{name}s" for name in own)]
    _require(signature, {*names, *keywords}, prompt)


def columns(prompt: Prompt) -> dict[str, Any]:
    """The record's fields but its prompt, by name; ``answer``, too, where that has another."""
    own = {} if prompt.answer is None else {"answer": prompt.answer}
    fields = own | dict(prompt.metadata) | dict(prompt.answer_column)
    return {name: value for name, value in fields.items() if name not in ("prompt", "completion")}


def _of_verl(prompt: Prompt) -> dict[str, Any]:
    """What verl's data would have of the record; a ground truth only where there is one."""
    metadata = prompt.metadata
    of_model = metadata.get("reward_model")  # where verl's own files have it
    truths = [*prompt.answer_column.values(), *([] if prompt.answer is None else [prompt.answer])]
    if isinstance(of_model, Mapping) and "ground_truth" in of_model:
        truths.append(of_model["ground_truth"])
    extra, own = columns(prompt), metadata.get("extra_info")
    if isinstance(own, Mapping):
        extra = {name: value for name, value in extra.items() if name != "extra_info"} | dict(own)
    given = {"data_source": metadata.get("data_source", ""), "extra_info": extra}
    return given | ({"ground_truth": truths[0]} if truths else {})


def _taken(signature: Signature, given: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Those of ``given`` that a function takes. Raises ``ValueError`` if it needs more."""
    _require(signature, given, prompt)
    if _takes_any(signature):
        return dict(given)
    return {name: value for name, value in given.items() if name in signature.parameters}


def _require(signature: Signature, given: Collection[str], prompt: Prompt) -> None:
    if missing := _missing(signature, given):
        remedy = "data.fields.answer" if missing[0].startswith("ground_truth") else "a field of it"
        had = ", ".join(sorted(columns(prompt))) or "nothing"
        raise ValueError(
            f"takes {missing[0]!r}, which the record does not have (beside its prompt: {had}); "
            f"give it as {remedy} or in kwargs"
        )


def _missing(signature: Signature, given: Collection[str]) -> list[str]:
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    return [
        p.name
        for p in signature.parameters.values()
        if p.kind not in variable and p.default is Parameter.empty and p.name not in given
    ]


def _takes_any(signature: Signature) -> bool:
    return any(p.kind == Parameter.VAR_KEYWORD for p in signature.parameters.values())


def _is_batch(signature: Signature) -> bool:
    return OF_VERL_BATCH[1] in signature.parameters


def _signature(function: RewardFunction) -> Signature:
    """Raises ``ValueError`` for a function in C that does not tell."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        raise ValueError(
            "does not tell what arguments it takes; define a function with def that calls it"
        ) from None


async def _all_of(said: Sequence[Any]) -> list[Any]:
    async def value(each: Any) -> Any:
        return await each if inspect.isawaitable(each) else each

    return await asyncio.gather(*map(value, said))
