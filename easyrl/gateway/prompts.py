"""A chat request's prompt: recorded ids and what is new, or the whole chat rendered afresh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easyrl.config import HistoryMode
from easyrl.gateway.errors import BadRequest
from easyrl.gateway.history import AnsweredTurn
from easyrl.gateway.rendering import Message, Renderer, Tools

_QUESTION, _ANSWER, _NEXT = "Question?", "An answer.", "Another question?"
_REASONING = "Reasoning."


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the model is shown."""

    ids: np.ndarray  # int32 [P], all of it
    previous: AnsweredTurn | None  # whose conversation is continued
    parent: AnsweredTurn | None  # ... whose ids too, which ``ids`` begin with
    new_ids: np.ndarray  # int32, behind the parent's
    new_text: str


def chat_prompt(
    renderer: Renderer,
    messages: Sequence[Message],
    previous: AnsweredTurn | None,
    mode: HistoryMode,
    tools: Tools = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of ``messages`` (``renderable``), which begin with ``previous``'s conversation.

    ``keep``: the sampled ids of ``previous`` stay, whatever the template makes of an earlier turn.
    ``as_template``: they stay where the template renders that turn as it was sampled. Wherever they
    do not, the chat is rendered afresh and begins a new branch. Raises ``BadRequest`` if the
    template refuses the chat.
    """
    if previous is not None:
        new_text = None
        if mode == "keep":
            new_text = _behind_answer(renderer, messages, previous, tools, kwargs)
        if new_text is None:
            new_text = _behind_recorded(renderer, messages, previous, tools, kwargs)
        if new_text is not None:
            new_ids = renderer.ids_behind(previous.last_id, new_text)
            ids = np.concatenate([previous.ids, new_ids])
            return ChatPrompt(ids, previous, previous, new_ids, new_text)
    text = renderer.text(messages, tools, kwargs)
    ids = renderer.ids_of_chat(text)
    return ChatPrompt(ids, previous, None, ids, text)


def template_continues(renderer: Renderer, kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Why the template does not render an answered turn as it was sampled once another question
    follows; None: it does, reasoning included."""
    question = {"role": "user", "content": _QUESTION}
    try:
        prompt = renderer.text([question], None, kwargs)
        opened = prompt.rstrip().endswith("<think>")
        reasoned = f"\n{_REASONING}\n</think>\n\n{_ANSWER}" if opened else None
        if reasoned is not None and prompt.endswith("\n"):
            reasoned = reasoned[1:]
        answers = [reasoned] if reasoned is not None else [_ANSWER]
        if "</think>" in renderer.chat_template and reasoned is None:
            answers.append(f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}")
        for answer in answers:
            chat = [
                question,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": _NEXT},
            ]
            whole = renderer.text(chat, None, kwargs)
            if not whole.startswith(prompt):
                return "it renders what came before an answer otherwise once another turn follows"
            if not whole.startswith(prompt + answer):
                if _REASONING in answer and _REASONING not in whole:
                    return "it leaves out the reasoning of earlier turns"
                return "it renders an answer otherwise than it was sampled once a turn follows"
    except BadRequest as error:
        return f"it refuses a chat of several turns: {error}"
    return None


def _behind_answer(
    renderer: Renderer,
    messages: Sequence[Message],
    previous: AnsweredTurn,
    tools: Tools,
    kwargs: Mapping[str, Any] | None,
) -> str | None:
    """What the template writes behind the answer of ``previous``, a mark in the answer's place.

    The end of the turn is left out where it was sampled. None: the mark cannot be found.
    """
    place = previous.num_messages - 1
    marked: Message = {"role": "assistant", "content": renderer.sentinel}
    behind = _behind_mark(renderer, messages, place, marked, tools, kwargs)
    if behind is not None:
        return _without_end(renderer, behind, previous)
    if not (calls := messages[place].get("tool_calls")):
        return None
    # The template wants to see that tools were called before they answer: the mark is the last
    # one's name, and what follows it belongs to the answer up to the end of the turn.
    last = {**calls[-1], "function": {**calls[-1]["function"], "name": renderer.sentinel}}
    marked = {**messages[place], "tool_calls": [*calls[:-1], last]}
    behind = _behind_mark(renderer, messages, place, marked, tools, kwargs)
    if behind is None:
        return None
    sampled = _sampled_end(renderer, previous)
    for end in (sampled, renderer.turn_end, str(renderer.tokenizer.eos_token or "")):
        if end and (at := behind.find(end)) >= 0:
            return behind[at + len(end) if sampled else at :]
    return None


def _behind_mark(
    renderer: Renderer,
    messages: Sequence[Message],
    place: int,
    marked: Message,
    tools: Tools,
    kwargs: Mapping[str, Any] | None,
) -> str | None:
    chat = [*messages[:place], marked, *messages[place + 1 :]]
    try:
        text = renderer.text(chat, tools, kwargs)
    except BadRequest:
        return None
    parts = text.split(renderer.sentinel)
    return parts[1] if len(parts) == 2 else None


def _sampled_end(renderer: Renderer, previous: AnsweredTurn) -> str:
    """The text of the token that was sampled last and ends a turn; empty: the turn was cut off."""
    last = previous.last_id
    ends = renderer.is_special(last) if renderer.end_ids is None else renderer.ends_turn(last)
    return renderer.token_text(last) if ends else ""


def _without_end(renderer: Renderer, behind: str, previous: AnsweredTurn) -> str:
    """A turn has one end: the sampled one, also where the template writes another."""
    sampled = _sampled_end(renderer, previous)
    own = renderer.turn_end if renderer.ends_turn(previous.last_id) else ""
    written = behind.lstrip()  # some templates put a space or a line's end before it
    for end in (sampled, own):
        if end.strip() and written.startswith(end):
            return written[len(end) :]
    return behind


def _behind_recorded(
    renderer: Renderer,
    messages: Sequence[Message],
    previous: AnsweredTurn,
    tools: Tools,
    kwargs: Mapping[str, Any] | None,
) -> str | None:
    """What the template writes behind the recorded text, given each answer as it was sampled.

    None: it renders what was recorded otherwise.
    """
    chat = list(messages)
    turn: AnsweredTurn | None = previous
    while turn is not None:
        chat[turn.num_messages - 1] = {"role": "assistant", "content": turn.said}
        turn = turn.previous
    recorded = previous.text
    try:
        text = renderer.text(chat, tools, kwargs)
    except BadRequest:
        return None
    return text[len(recorded) :] if text.startswith(recorded) else None
