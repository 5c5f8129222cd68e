"""Log-probabilities of sampled tokens as the routes tell them, written as JSON token by token.

What is the same each time that a token is sampled is kept: no dictionary is made for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import orjson


def generate_logprobs(token_ids: np.ndarray, logprobs: np.ndarray) -> orjson.Fragment:
    """vLLM's: id and log-probability, and the same as the one of the most probable; no rank.

    ``token_ids``: int32 [R], ``logprobs``: float32 [R].
    """
    tokens = [
        b'{"token_id":%b,"logprob":%b,"rank":null,"top_logprobs":'
        b'[{"token_id":%b,"logprob":%b,"rank":null}]}' % (token_id, logprob, token_id, logprob)
        for token_id, logprob in zip(_numbers(token_ids), _numbers(logprobs), strict=True)
    ]
    return _array(tokens)


class ChatLogprobs:
    """OpenAI's: a token's text, its bytes and its log-probability, no others beside it."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._head = cache(self._written)

    def of(
        self, token_ids: np.ndarray, logprobs: np.ndarray, *, tokens_as_ids: bool = False
    ) -> orjson.Fragment:
        """Of int32 [R] and float32 [R]; ``tokens_as_ids``: a token's text is ``token_id:ID``."""
        return _array(
            [
                self._head(token_id, tokens_as_ids) + logprob + b"}"
                for token_id, logprob in zip(token_ids.tolist(), _numbers(logprobs), strict=True)
            ]
        )

    def _written(self, token_id: int, as_id: bool) -> bytes:
        """All but the log-probability and the end."""
        text = self._token_text(token_id)
        told = {
            "token": f"token_id:{token_id}" if as_id else text,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        return orjson.dumps(told)[:-1] + b',"logprob":'


def _numbers(values: np.ndarray) -> list[bytes]:
    """Each as JSON."""
    return orjson.dumps(values.tolist())[1:-1].split(b",") if len(values) else []


def _array(written: list[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(written) + b"]")
