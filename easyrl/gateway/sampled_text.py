"""The text of a sampled turn, up to what ended it."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.gateway.questions import SampledTurn
from easyrl.gateway.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Stops:
    """What could have ended a turn beside the model's own end, training's among them."""

    texts: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SampledText:
    """What was sampled, as texts."""

    told: str  # to the client: without special tokens, and what ended the turn
    told_special: str  # the same with special tokens
    whole: str  # all that belongs to the message, a stop text or token too; no special tokens
    said: str  # the same with special tokens


def sampled_text(renderer: Renderer, sampled: SampledTurn, stops: Stops) -> SampledText:
    """Of a turn that ended by itself, the token that ends every one is in none of them.

    A stop token that is another one, as ``</tool_call>`` may be, is part of the message, though a
    client is not told it.
    """
    token_ids = sampled.token_ids.tolist()
    if sampled.finish_reason != "stop":
        return _of(renderer, token_ids, token_ids)
    last = token_ids[-1]
    if renderer.ends_turn(last):
        return _of(renderer, token_ids[:-1], token_ids[:-1])
    if stops.texts:
        plain = _of(renderer, token_ids, token_ids)
        ends = [(at + len(s), at) for s in stops.texts if (at := plain.whole.find(s)) >= 0]
        if ends:
            told = plain.whole[: min(ends)[1]]
            return SampledText(told, told, plain.whole, plain.said)
    if renderer.end_ids is None:  # whatever it was
        return _of(renderer, token_ids[:-1], token_ids[:-1])
    # a server that leaves the end out has said all of it
    return _of(renderer, token_ids[:-1] if last in stops.token_ids else token_ids, token_ids)


def _of(renderer: Renderer, told: list[int], whole: list[int]) -> SampledText:
    texts = _both(renderer, told)
    return SampledText(
        *texts, *(texts if told is whole or told == whole else _both(renderer, whole))
    )


def _both(renderer: Renderer, token_ids: list[int]) -> tuple[str, str]:
    """Without the special tokens, and with them."""
    said = renderer.decode(token_ids)
    if not renderer.has_special(token_ids):
        return said, said
    return renderer.decode(token_ids, skip_special_tokens=True), said
