"""Decodes what ``POST /inference/v1/generate`` answers. Runs in fetchers: imports nothing heavy.

The server writes an object per token; only the fields named here are read, the rest is skipped
without becoming a Python object.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np

from easyrl.completion_check import INT32_ALONE, CompletionLimits, completion_problem
from easyrl.inference_client.answers import Count, Word, decode, shorten
from easyrl.inference_client.errors import MalformedResponse
from easyrl.schema import Completion, VersionSpan

GENERATE = "/inference/v1/generate"
ROUTE = f"POST {GENERATE}"


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct, gc=False):
    version: Word
    start: Count
    end: Count


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[Count]
    logprobs: _Logprobs
    weight_versions: list[_Span] | None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int


class _Response(msgspec.Struct):
    usage: _Usage
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Response)
_token_id, _logprob, _index = attrgetter("token_id"), attrgetter("logprob"), attrgetter("index")


def parse_generate_response(
    body: bytes,
    url: str,
    prompt_length: int,
    limits: CompletionLimits = INT32_ALONE,
    *,
    n: int | None = None,
) -> list[Completion]:
    """The choices of a response in order of their index, ``loss_mask`` all true.

    A stop token, and the tokens of a stop string, are part of ``token_ids``. Raises
    ``MalformedResponse`` naming the field if the body is not complete JSON, a choice is nothing to
    train on (``completion_problem``) or was not finished (``abort``), token ids and
    log-probabilities disagree, the server used another number of prompt tokens than
    ``prompt_length``, or gives other than ``n`` choices.
    """
    response = decode(_DECODER, body, url, ROUTE)
    try:
        num_prompt_tokens = response.usage.prompt_tokens
        if num_prompt_tokens != prompt_length:
            raise _Unusable(f"used {num_prompt_tokens} prompt tokens of {prompt_length}")
        choices = sorted(response.choices, key=_index)
        if [choice.index for choice in choices] != list(range(len(choices))) or not choices:
            raise _Unusable(f"choices {[choice.index for choice in choices[:8]]}")
        if n is not None and len(choices) != n:
            raise _Unusable(f"{len(choices)} choices, asked for {n}")
        return [_completion(choice, url, limits) for choice in choices]
    except _Unusable as error:
        raise MalformedResponse(url, f"{ROUTE}: {shorten(str(error))}") from None


class _Unusable(ValueError):
    """What is wrong with a response, in words."""


def _completion(choice: _Choice, url: str, limits: CompletionLimits) -> Completion:
    where = f"choices[{choice.index}]"
    if choice.weight_versions is None:
        raise _Unusable(f"{where}: the server does not stamp weight versions on its tokens")
    made = Completion(
        token_ids=np.array(choice.token_ids, dtype=np.int32),
        logprobs=_logprobs(choice, where),
        finish_reason=str(choice.finish_reason),
        version_spans=tuple(VersionSpan(s.version, s.start, s.end) for s in choice.weight_versions),
        endpoint=url,
        loss_mask=np.ones(len(choice.token_ids), dtype=bool),
    )
    if (problem := completion_problem(made, limits)) is not None:
        raise _Unusable(f"{where}.{problem}")
    return made


def _logprobs(choice: _Choice, where: str) -> np.ndarray:
    """float32 [R]"""
    content = choice.logprobs.content
    if len(content) == len(choice.token_ids):  # else the check says so
        if list(map(_token_id, content)) != choice.token_ids:
            raise _Unusable(f"{where}.logprobs: are of other tokens than token_ids")
    with np.errstate(over="ignore"):  # becomes infinite, which the check finds
        return np.array(list(map(_logprob, content)), dtype=np.float32)
