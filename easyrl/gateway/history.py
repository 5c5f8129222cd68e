"""The conversations of a session that the gateway answered, found again by their messages.

What was answered keeps its sampled ids: a request whose messages continue a recorded conversation
is given the recorded ids, and of its own only what is new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

Message = Mapping[str, Any]

# Keys of a message that say nothing of it, as clients' own types carry them along.
_SILENT = {"refusal", "annotations", "audio", "function_call", "index"}
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredTurn:
    """A turn that was answered: what the model was shown, and what it sampled."""

    num_messages: int  # of its conversation, the answer included
    previous: AnsweredTurn | None  # whose conversation it continues
    parent: AnsweredTurn | None  # ... whose ids too; None: its own begin the prompt
    own_ids: np.ndarray  # int32, behind the parent's: what is new of the prompt, and the sampled
    own_text: Callable[[], str]  # of the same; few templates need it, and it is decoded then
    said: str  # the sampled text, without the end of the turn

    @property
    def last_id(self) -> int:
        return int(self.own_ids[-1])

    @property
    def ids(self) -> np.ndarray:
        """int32: prompt and sampled."""
        return np.concatenate([turn.own_ids for turn in reversed(list(self._line()))])

    @property
    def text(self) -> str:
        return "".join(turn.own_text() for turn in reversed(list(self._line())))

    def _line(self) -> Iterator[AnsweredTurn]:
        turn: AnsweredTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


class History:
    """The answered turns of one session, by conversation; of equal ones the newest."""

    def __init__(self) -> None:
        self._turns: dict[bytes, AnsweredTurn] = {}

    def longest(self, chain: Sequence[bytes]) -> AnsweredTurn | None:
        """The longest recorded conversation that ``chain`` begins with."""
        for key in reversed(chain):
            if (turn := self._turns.get(key)) is not None:
                return turn
        return None

    def record(self, chain: Sequence[bytes], answer: Message, turn: AnsweredTurn) -> None:
        """``answer`` is the assistant's message that the client is told, behind ``chain``'s."""
        self._turns[_linked(chain[-1], answer)] = turn


def chain_of(context: Any, messages: Sequence[Message]) -> list[bytes]:
    """A key for each beginning of a conversation, the empty one first.

    ``context``: what else the prompt is rendered with, JSON-able: tools and settings.
    """
    chain = [hashlib.blake2b(_encode(context), digest_size=16).digest()]
    for message in messages:
        chain.append(_linked(chain[-1], message))
    return chain


def _linked(key: bytes, message: Message) -> bytes:
    said = _encode(_meaning(message))
    return hashlib.blake2b(key + said, digest_size=16).digest()


def _meaning(message: Message) -> dict[str, Any]:
    """What two messages have in common that say the same: no empty keys, arguments by value."""
    meaning = {
        key: value
        for key, value in message.items()
        if key not in _SILENT and value is not None and value != "" and value != []
    }
    if isinstance(calls := meaning.get("tool_calls"), list):
        meaning["tool_calls"] = [_call_meaning(call) for call in calls]
    return meaning


def _call_meaning(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            pass  # compared as text
    return [call.get("id"), function.get("name"), arguments]
