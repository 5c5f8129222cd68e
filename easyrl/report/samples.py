"""The newest samples of a run as the report shows them: token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.report.packing import packed
from easyrl.report.stamps import Stamp, stamps
from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.samples.show import heading, readable, response_heading
from easyrl.samples.turns import shown_turns

MOST_TOKENS = 2000  # of a response
# Of all that is shown: a page has to open. At least one step.
MOST_TOKENS_IN_ALL = 200_000
Decode = Callable[[Sequence[int]], str]


class NewestSamples:
    """Those of the newest steps; a step that is as it was is neither read nor decoded again."""

    def __init__(self, run_dir: Path, decode: Decode) -> None:
        self._folder, self._decode = SampleFolder(run_dir), decode
        self._token = cache(lambda token: readable(decode([token])))  # most come again and again
        self._kept: dict[int, _Kept] = {}

    def shown(self) -> list[dict[str, Any]]:
        """As many steps as a page bears, the newest first: {"step", "groups"}.

        "groups", ``packed``: [{"heading", "prompt", "responses": [{"heading", "tokens",
        "advantages", "logprobs", "differences", "left_out", "turns"}]}]; "left_out": tokens behind
        those that are shown; "turns", of an episode: [{"heading", "writer", "branch", "start",
        "sampled", "end"}].
        """
        found_stamps = stamps((file.step, file.path) for file in self._folder.files())
        kept: dict[int, _Kept] = {}
        num_tokens = 0
        for step, stamp in reversed(found_stamps.items()):
            found = self._kept.get(step)
            if found is None or found.stamp != stamp:
                groups = self._folder.read(step)
                found = _Kept(stamp, _num_shown(groups), groups=groups)
            num_tokens += found.num_tokens
            if kept and num_tokens > MOST_TOKENS_IN_ALL:
                break
            if found.groups:
                drawn = [_group(group, self._decode, self._token) for group in found.groups]
                found = _Kept(stamp, found.num_tokens, packed(drawn))
            kept[step] = found
        self._kept = kept
        return [{"step": step, "groups": own.packed} for step, own in kept.items() if own.packed]


class _Kept(NamedTuple):
    """A step's samples: read, or packed and then no more than that."""

    stamp: Stamp
    num_tokens: int
    packed: str = ""
    groups: Sequence[SampledGroup] = ()


def _num_shown(groups: Sequence[SampledGroup]) -> int:
    return sum(
        min(len(response.token_ids), MOST_TOKENS)
        for group in groups
        for response in group.responses
    )


def _group(group: SampledGroup, decode: Decode, token: Callable[[int], str]) -> dict[str, Any]:
    return {
        "heading": heading(group),
        "prompt": readable(decode(group.prompt_ids)),
        "responses": [
            _response(number, response, decode, token)
            for number, response in enumerate(group.responses)
        ],
    }


def _response(
    number: int, response: SampledResponse, decode: Decode, token: Callable[[int], str]
) -> dict[str, Any]:
    shown = response.token_ids[:MOST_TOKENS]
    own = response.token_advantages
    if not own and response.advantage is not None:
        own = [response.advantage] * len(response.token_ids)
    return {
        "heading": response_heading(number, response),
        "tokens": [token(each) for each in shown],
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
