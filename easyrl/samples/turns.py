"""An episode as people read it: its turns one by one, what each was shown and what it sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.gateway.tool_parsers import PARSERS, ToolCall
from easyrl.samples.records import SampledResponse, SampledTurn
from easyrl.schema import JournalledTurn

Decode = Callable[[Sequence[int]], str]  # token ids → text, special tokens too

MOST_CALL_CHARACTERS = 120  # of a tool call in a heading; the whole stands in the text
_BEFORE_JSON = "<|python_tag|>"


class ShownTurn(NamedTuple):
    """One turn, and how it stands to the others."""

    turn: SampledTurn
    branch: int  # 0: the first; another one begins at this turn or before it
    heading: str
    writer: str  # of what it was shown behind its parent's tokens: "environment", "tool results"


def shown_turns(response: SampledResponse, decode: Decode) -> Iterator[ShownTurn]:
    """The turns of an episode, in the order in which they were recorded."""
    branches: list[int] = []  # of each turn
    asked: list[bool] = []  # whether it calls tools
    continued: set[int] = set()
    for number, turn in enumerate(response.turns):
        place = f"turn {number}"
        if turn.parent is None:
            branches.append(number and max(branches) + 1)
            place += ", a new beginning" if number else ""
        elif turn.parent in continued:
            branches.append(max(branches) + 1)
            place += f", branches off behind turn {turn.parent}"
        else:
            branches.append(branches[turn.parent])
            place += f", continues turn {turn.parent}"
        if turn.parent is not None:
            continued.add(turn.parent)
        calls = tool_calls(decode(response.token_ids[turn.sampled : turn.end]))
        asked.append(bool(calls))
        is_answer = turn.parent is not None and asked[turn.parent]
        parts = [
            place,
            f"branch {branches[-1]}" if len(response.turns) > 1 else "",
            f"shown {turn.sampled - turn.start} tokens, sampled {turn.end - turn.sampled}",
            "" if turn.reward is None else f"reward {turn.reward:+.3f}",
            *(f"calls {_call(call)}" for call in calls),
            "cut off" if turn.finish_reason == "length" else "",
        ]
        writer = "tool results" if is_answer else "environment"
        yield ShownTurn(turn, branches[-1], " | ".join(filter(None, parts)), writer)


def unfinished_response(turns: Sequence[JournalledTurn]) -> SampledResponse:
    """What an episode has come to that has not ended, from the journal; at least one turn."""
    token_ids: list[int] = []
    sampled = []
    for turn in turns:
        made, start = turn.completion, len(token_ids)
        token_ids += [*turn.prompt_ids.tolist(), *made.token_ids.tolist()]
        begins, end = start + len(turn.prompt_ids), len(token_ids)
        sampled.append(
            SampledTurn(start, begins, end, turn.parent, made.finish_reason, endpoint=made.endpoint)
        )
    last = turns[-1]
    return SampledResponse(
        token_ids,
        last.completion.finish_reason,
        turns=sampled,
        environment=last.environment,
    )


def tool_calls(text: str) -> list[ToolCall]:
    """What a sampled text calls, in the first of the ways that the gateway reads."""
    said = _without_special_ends(text)
    for parser in PARSERS.values():
        if calls := parser.parse(said, _EVERY_TOOL)[1]:
            return calls
    return []


def _without_special_ends(text: str) -> str:
    """Without special tokens at its end, whitespace, and what some templates begin a call with.

    One pass: a model may repeat a special token without an end.
    """
    start, end = 0, len(text)
    while True:
        while end > start and text[end - 1].isspace():
            end -= 1
        if text.endswith("</s>", start, end):
            end -= len("</s>")
            continue
        opened = text.rfind("<|", start, end - 2) if text.endswith("|>", start, end) else -1
        if opened < 0 or any(mark in text[opened + 2 : end - 2] for mark in "<|>"):
            break
        end = opened
    while True:
        while start < end and text[start].isspace():
            start += 1
        if not text.startswith(_BEFORE_JSON, start, end):
            return text[start:end]
        start += len(_BEFORE_JSON)


class _EveryTool(Mapping[str, Mapping[str, Any]]):
    """All tools there could be: which there were is not kept."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return {}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


_EVERY_TOOL = _EveryTool()


def _call(call: ToolCall) -> str:
    text = f"{call.name}({call.arguments})"
    short = text[:MOST_CALL_CHARACTERS]
    return text if short == text else f"{short} …"
