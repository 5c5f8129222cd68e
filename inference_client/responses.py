"""Decodes what ``POST /inference/v1/generate`` answers. Runs in workers: imports nothing heavy."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from easyrl.inference_client.errors import MalformedResponse
from easyrl.schema import Completion, VersionSpan

USABLE_FINISH_REASONS = ("stop", "length")
MISSING_LOGPROB = -9999.0  # vLLM writes this where a log-probability is NaN or was not recorded


def parse_generate_response(body: bytes, url: str, prompt_length: int) -> list[Completion]:
    """The choices of a response in order of their index, ``loss_mask`` all true.

    A stop token, and the tokens of a stop string, are part of ``token_ids``. Raises
    ``MalformedResponse`` if the body is not complete JSON, token ids and log-probabilities
    disagree, version spans do not cover the tokens one after another, the server used another
    number of prompt tokens than ``prompt_length``, or a choice was not finished (``abort``).
    """
    try:
        return _parse(body, url, prompt_length)
    except orjson.JSONDecodeError as error:
        raise MalformedResponse(url, f"not JSON ({len(body)} bytes, truncated?): {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        description = f"{type(error).__name__}: {error}"
        raise MalformedResponse(url, f"unexpected shape of the response: {description}") from None


def _parse(body: bytes, url: str, prompt_length: int) -> list[Completion]:
    response = orjson.loads(body)
    num_prompt_tokens = response["usage"]["prompt_tokens"]
    if num_prompt_tokens != prompt_length:
        raise MalformedResponse(url, f"used {num_prompt_tokens} prompt tokens of {prompt_length}")
    choices = sorted(response["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(len(choices))) or not choices:
        raise MalformedResponse(url, f"choices {[choice['index'] for choice in choices]}")
    return [_completion(choice, url) for choice in choices]


def _completion(choice: dict[str, Any], url: str) -> Completion:
    finish_reason = choice["finish_reason"]
    if finish_reason not in USABLE_FINISH_REASONS:
        raise MalformedResponse(
            url, f"finish_reason is {finish_reason!r}, the response is not usable"
        )
    token_ids = np.array(choice["token_ids"], dtype=np.int32)
    if token_ids.ndim != 1 or len(token_ids) == 0:
        raise MalformedResponse(url, "a choice has no tokens")
    return Completion(
        token_ids=token_ids,
        logprobs=_logprobs(choice, token_ids, url),
        finish_reason=finish_reason,
        version_spans=_version_spans(choice, len(token_ids), url),
        endpoint=url,
        loss_mask=np.ones(len(token_ids), dtype=bool),
    )


def _logprobs(choice: dict[str, Any], token_ids: np.ndarray, url: str) -> np.ndarray:
    """float32 [R]"""
    content = choice["logprobs"]["content"]
    logprobs = np.array([token["logprob"] for token in content], dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise MalformedResponse(
            url, f"{len(token_ids)} tokens but {len(logprobs)} log-probabilities"
        )
    if [token["token_id"] for token in content] != token_ids.tolist():
        raise MalformedResponse(url, "log-probabilities are of other tokens than token_ids")
    if not np.all(np.isfinite(logprobs) & (logprobs > MISSING_LOGPROB)):
        raise MalformedResponse(url, "a log-probability is missing or not a number")
    return logprobs


def _version_spans(choice: dict[str, Any], num_tokens: int, url: str) -> tuple[VersionSpan, ...]:
    given = choice["weight_versions"]
    if given is None:
        raise MalformedResponse(url, "the server does not stamp weight versions on its tokens")
    spans = tuple(VersionSpan(span["version"], span["start"], span["end"]) for span in given)
    borders = [0, *(span.end for span in spans)]
    contiguous = [span.start for span in spans] == borders[:-1] and borders == sorted(set(borders))
    if not contiguous or borders[-1] != num_tokens:
        raise MalformedResponse(url, f"weight versions {spans} do not cover {num_tokens} tokens")
    return spans
