"""The newest samples of a run as the report shows them: token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.samples.show import heading, readable, response_heading

MOST_STEPS = 20
MOST_TOKENS = 2000  # of a response
Decode = Callable[[Sequence[int]], str]


def shown_samples(folder: SampleFolder, decode: Decode) -> list[dict[str, Any]]:
    """Of the newest steps, the newest first: {"step", "groups": [{"heading", "prompt",
    "responses": [{"heading", "tokens", "advantages", "logprobs"}]}]}."""
    steps = folder.steps()[-MOST_STEPS:]
    return [
        {"step": step, "groups": [_group(group, decode) for group in folder.read(step)]}
        for step in reversed(steps)
    ]


def _group(group: SampledGroup, decode: Decode) -> dict[str, Any]:
    return {
        "heading": heading(group),
        "prompt": readable(decode(group.prompt_ids)),
        "responses": [
            _response(number, response, decode) for number, response in enumerate(group.responses)
        ],
    }


def _response(number: int, response: SampledResponse, decode: Decode) -> dict[str, Any]:
    shown = response.token_ids[:MOST_TOKENS]
    own = response.token_advantages
    if not own and response.advantage is not None:
        own = [response.advantage] * len(response.token_ids)
    return {
        "heading": response_heading(number, response),
        "tokens": [readable(decode([token])) for token in shown],
        "advantages": [None if a is None else round(a, 4) for a in own[: len(shown)]],
        "logprobs": [None if p is None else round(p, 3) for p in response.logprobs[: len(shown)]],
        "left_out": len(response.token_ids) - len(shown),
    }
