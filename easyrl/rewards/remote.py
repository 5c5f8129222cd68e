"""The reward that a server of the user's gives, asked over HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.rewards.http_request import RequestFailed, Urls, Variable, post_json
from easyrl.schema import Prompt


async def remote(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    urls: Urls,
    timeout_s: float,
    send_token_ids: bool = False,
    api_key_env: Variable | None = None,
) -> list[float]:
    """What a server answers to ``POST URL`` with the prompt and its responses.

    The request is ``{"prompt", "system", "answer", "metadata", "location", "index", "epoch",
    "responses"}``, with ``send_token_ids`` also ``"prompt_token_ids"`` and
    ``"response_token_ids"``; the answer is ``{"rewards": [a finite number per response]}``.

    Args:
        urls: where to send it; a prompt begins with one of them, and goes on to the next where
            that fails.
        timeout_s: of the call, the reward's own key.
        api_key_env: environment variable with the bearer token.

    Raises ``RequestFailed`` if no server answers in time, or with anything else.
    """
    if not texts:
        return []
    body: dict[str, Any] = {
        "prompt": prompt.text,
        "system": prompt.system,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "location": prompt.location,
        "index": prompt.index,
        "epoch": prompt.epoch,
        "responses": list(texts),
    }
    if send_token_ids:
        body["prompt_token_ids"] = prompt.token_ids.tolist()
        body["response_token_ids"] = [ids.tolist() for ids in token_ids]
    url, answer = await post_json(
        urls, body, api_key_env=api_key_env, timeout_s=timeout_s, first=prompt.index
    )
    return _rewards(url, answer, len(texts))


def _rewards(url: str, answer: Any, num_responses: int) -> list[float]:
    values = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(values, list):
        raise RequestFailed(f'{url} answers {answer!r:.200}; expected {{"rewards": [numbers]}}')
    if len(values) != num_responses:
        raise RequestFailed(f"{url} gives {len(values)} rewards for {num_responses} responses")
    for index, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise RequestFailed(f"{url} gives {value!r:.50} for response {index}, no finite number")
    return [float(value) for value in values]
