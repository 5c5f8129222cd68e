"""Decodes what ``POST /inference/v1/generate`` answers. Runs in fetchers: imports nothing heavy.

The server writes an object per token; only the fields named here are read, the rest is skipped
without becoming a Python object.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np

from easyrl.inference_client.errors import MalformedResponse
from easyrl.schema import Completion, VersionSpan

USABLE_FINISH_REASONS = ("stop", "length")
MISSING_LOGPROB = -9999.0  # vLLM writes this where a log-probability is NaN or was not recorded


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span] | None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int


class _Response(msgspec.Struct):
    usage: _Usage
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Response).decode
_token_id, _logprob, _index = attrgetter("token_id"), attrgetter("logprob"), attrgetter("index")


def parse_generate_response(body: bytes, url: str, prompt_length: int) -> list[Completion]:
    """The choices of a response in order of their index, ``loss_mask`` all true.

    A stop token, and the tokens of a stop string, are part of ``token_ids``. Raises
    ``MalformedResponse`` if the body is not complete JSON, token ids and log-probabilities
    disagree, version spans do not cover the tokens one after another, the server used another
    number of prompt tokens than ``prompt_length``, or a choice was not finished (``abort``).
    """
    try:
        response = _decode(body)
        num_prompt_tokens = response.usage.prompt_tokens
        if num_prompt_tokens != prompt_length:
            used = f"used {num_prompt_tokens} prompt tokens of {prompt_length}"
            raise MalformedResponse(url, used)
        choices = sorted(response.choices, key=_index)
        if [choice.index for choice in choices] != list(range(len(choices))) or not choices:
            raise MalformedResponse(url, f"choices {[choice.index for choice in choices]}")
        return [_completion(choice, url) for choice in choices]
    except (msgspec.ValidationError, OverflowError) as error:
        raise MalformedResponse(url, f"unexpected shape of the response: {error}") from None
    except msgspec.DecodeError as error:
        raise MalformedResponse(url, f"not JSON ({len(body)} bytes, truncated?): {error}") from None


def _completion(choice: _Choice, url: str) -> Completion:
    if choice.finish_reason not in USABLE_FINISH_REASONS:
        raise MalformedResponse(
            url, f"finish_reason is {choice.finish_reason!r}, the response is not usable"
        )
    if not choice.token_ids:
        raise MalformedResponse(url, "a choice has no tokens")
    return Completion(
        token_ids=np.array(choice.token_ids, dtype=np.int32),
        logprobs=_logprobs(choice, url),
        finish_reason=choice.finish_reason,
        version_spans=_version_spans(choice, url),
        endpoint=url,
        loss_mask=np.ones(len(choice.token_ids), dtype=bool),
    )


def _logprobs(choice: _Choice, url: str) -> np.ndarray:
    """float32 [R]"""
    content = choice.logprobs.content
    if len(content) != len(choice.token_ids):
        raise MalformedResponse(
            url, f"{len(choice.token_ids)} tokens but {len(content)} log-probabilities"
        )
    if list(map(_token_id, content)) != choice.token_ids:
        raise MalformedResponse(url, "log-probabilities are of other tokens than token_ids")
    logprobs = np.array(list(map(_logprob, content)), dtype=np.float32)
    if not np.all(np.isfinite(logprobs) & (logprobs > MISSING_LOGPROB)):
        raise MalformedResponse(url, "a log-probability is missing or not a number")
    return logprobs


def _version_spans(choice: _Choice, url: str) -> tuple[VersionSpan, ...]:
    if choice.weight_versions is None:
        raise MalformedResponse(url, "the server does not stamp weight versions on its tokens")
    spans = tuple(VersionSpan(s.version, s.start, s.end) for s in choice.weight_versions)
    borders = [0, *(span.end for span in spans)]
    contiguous = [span.start for span in spans] == borders[:-1] and borders == sorted(set(borders))
    if not contiguous or borders[-1] != len(choice.token_ids):
        raise MalformedResponse(
            url, f"weight versions {spans} do not cover {len(choice.token_ids)} tokens"
        )
    return spans
