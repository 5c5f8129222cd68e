"""The token route's answers, as vLLM and the embedded server write them."""

from __future__ import annotations

from typing import Any

from easyrl.gateway.chat import usage
from easyrl.gateway.logprobs import generate_logprobs
from easyrl.gateway.questions import SampledTurn
from easyrl.gateway.requests import GenerateRequest


def generate_response(
    sampled: SampledTurn, request: GenerateRequest, model: str, text: str | None
) -> dict[str, Any]:
    """vLLM's ``GenerateTokensResponse``, stamps included. ``text``: where it is asked for."""
    logprobs = None
    if request.logprobs:
        logprobs = generate_logprobs(sampled.token_ids, sampled.logprobs)
    choice: dict[str, Any] = {} if text is None else {"text": text}
    choice |= {
        "index": 0,
        "finish_reason": sampled.finish_reason,
        "stop_reason": None,
        "token_ids": sampled.token_ids.tolist(),
        "logprobs": {"content": logprobs} if request.logprobs else None,
        "weight_versions": [span._asdict() for span in sampled.version_spans],
    }
    return {
        "request_id": sampled.id,
        "model": model,
        "created": sampled.created,
        "usage": usage(sampled),
        "prompt_token_ids": sampled.prompt_ids.tolist() if request.return_token_ids else None,
        "output_mode": "tokens" if text is None else "text",
        "choices": [choice],
    }
