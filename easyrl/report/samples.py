"""The newest samples of a run as the report shows them: token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from easyrl.report.packing import packed
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.samples.show import heading, readable, response_heading
from easyrl.samples.turns import shown_turns

MOST_TOKENS = 2000  # of a response
# Of all that is shown: a page has to open, and each token is decoded alone. At least one step.
MOST_TOKENS_IN_ALL = 200_000
Decode = Callable[[Sequence[int]], str]


def shown_samples(folder: SampleFolder, decode: Decode) -> list[dict[str, Any]]:
    """Of the newest steps, the newest first, as many as a page bears: {"step", "groups"}.

    "groups", ``packed``: [{"heading", "prompt", "responses": [{"heading", "tokens", "advantages",
    "logprobs", "differences", "left_out", "turns"}]}]; "left_out": tokens behind those that are
    shown; "turns", of an episode: [{"heading", "writer", "branch", "start", "sampled", "end"}].
    """
    shown: list[dict[str, Any]] = []
    num_tokens = 0
    for step in reversed(folder.steps()):
        groups = folder.read(step)
        num_tokens += sum(
            min(len(response.token_ids), MOST_TOKENS)
            for group in groups
            for response in group.responses
        )
        if shown and num_tokens > MOST_TOKENS_IN_ALL:
            break
        if groups:
            drawn = [_group(group, decode) for group in groups]
            shown.append({"step": step, "groups": packed(drawn)})
    return shown


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
        "differences": response.token_logprob_diffs[: len(shown)],
        "left_out": len(response.token_ids) - len(shown),
        "turns": [
            {
                "heading": readable(turn.heading, lines=False),
                "writer": turn.writer,
                "branch": turn.branch,
                "start": turn.turn.start,
                "sampled": turn.turn.sampled,
                "end": turn.turn.end,
            }
            for turn in shown_turns(response, decode)
            if turn.turn.start < len(shown)
        ],
    }
