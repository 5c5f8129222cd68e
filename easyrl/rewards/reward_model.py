"""The reward that a scalar reward model gives, served as a sequence classifier of one label."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from easyrl.rewards.http_request import BaseUrls, RequestFailed, Variable, post_json
from easyrl.schema import Prompt

CLASSIFY = "/classify"
SERVE = "serve a sequence-classification model (vllm serve MODEL --runner pooling, easyrl serve)"


async def reward_model(
    prompt: Prompt,
    texts: Sequence[str],
    token_ids: Sequence[np.ndarray],
    *,
    urls: BaseUrls,
    timeout_s: float,
    input: Literal["tokens", "text", "chat"] = "tokens",
    model: str | None = None,
    api_key_env: Variable | None = None,
) -> list[float]:
    """The model's output for each response, before any activation (a logit).

    Args:
        urls: base URLs of servers with vLLM's route ``/classify``; all serve the same model. A
            prompt begins with one of them, and goes on to the next where that fails.
        timeout_s: of the call, the reward's own key.
        input: ``tokens``: the ids of prompt and response, which takes the policy's tokenizer;
            ``text``: question and response one behind the other, read by the server's tokenizer;
            ``chat``: question and response as two messages, in the server's chat template, each
            response in a request of its own.
        model: its name at the server; default: the server's only one.
        api_key_env: environment variable with the bearer token.

    Raises ``RequestFailed`` if no server answers in time, or if an answer is not one finite number
    per response.
    """
    if not texts:
        return []
    bodies = _bodies(prompt, texts, token_ids, input)
    common = {"use_activation": False} | ({} if model is None else {"model": model})
    routes = [url.rstrip("/") + CLASSIFY for url in urls]
    answers = await asyncio.gather(
        *(
            post_json(
                routes,
                body | common,
                api_key_env=api_key_env,
                timeout_s=timeout_s,
                first=prompt.index,
                no_route=SERVE,
            )
            for body in bodies
        )
    )
    num_each = len(texts) // len(bodies)
    return [value for url, answer in answers for value in _values(url, answer, num_each)]


def _bodies(
    prompt: Prompt, texts: Sequence[str], token_ids: Sequence[np.ndarray], kind: str
) -> list[dict[str, Any]]:
    """One request with all responses, or with ``chat`` one for each."""
    if kind == "tokens":
        return [{"input": [[*prompt.token_ids.tolist(), *ids.tolist()] for ids in token_ids]}]
    if kind == "text":
        return [{"input": [prompt.text + text for text in texts]}]
    question = {"role": "user", "content": prompt.text}
    answers = [{"role": "assistant", "content": text} for text in texts]
    return [{"messages": [question, answer]} for answer in answers]


def _values(url: str, answer: Any, num_responses: int) -> list[float]:
    """The logits of an answer, in the order of the request. Raises ``RequestFailed``."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(each, dict) for each in data):
        raise RequestFailed(f"{url} answers {answer!r:.200}; expected vLLM's list 'data'; {SERVE}")
    if len(data) != num_responses:
        raise RequestFailed(f"{url} gives {len(data)} scores for {num_responses} responses")
    by_index = {each.get("index"): each.get("probs") for each in data}
    values = []
    for index in range(num_responses):
        found = by_index.get(index)
        if not isinstance(found, list):
            raise RequestFailed(f"{url} gives no score for response {index}: {data!r:.200}")
        if len(found) != 1:
            raise RequestFailed(
                f"{url} serves a model with {len(found)} labels; a reward model has one"
            )
        (value,) = found
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise RequestFailed(f"{url} gives {value!r:.50} for response {index}, no number")
        if value is None or not math.isfinite(value):
            raise RequestFailed(f"{url} gives {value} for response {index}; is the model whole?")
        values.append(float(value))
    return values
