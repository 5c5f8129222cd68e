"""Chats as the model is shown them: the chat template's text, and its token ids."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import numpy as np

from easyrl.gateway.errors import BadRequest
from easyrl.gateway.logprobs import ChatLogprobs
from easyrl.gateway.text_codec import TextCodec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

# Chats that other samples of their groups may begin with, too, of so many bytes each at most. Each
# byte may be a character of four (in a text with one beyond the BMP) and an id: 67 MB for all.
KEPT_CHATS, KEPT_BYTES = 128, 2**16


class Renderer:
    """A tokenizer and a chat template.

    ``end_ids``: each ends a turn of the model's; None: not known. Raises ``ValueError`` if the
    tokenizer has no template and none is given.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        end_ids: Collection[int] | None = None,
        max_context: int | None = None,
    ) -> None:
        if chat_template is None and tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template; give one as data.chat_template, or use the "
                "token route alone"
            )
        self.tokenizer = tokenizer
        self._codec = TextCodec(tokenizer)
        self._template, self._kwargs = chat_template, dict(kwargs or {})
        self.end_ids = None if end_ids is None else frozenset(end_ids)
        self._special_ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        self.token_text = cache(self._token_text)
        self.logprobs = ChatLogprobs(self.token_text)
        self.max_context = max_context
        # in bytes, or more: byte-level vocabularies have a letter for each byte
        self._longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())
        self.sentinel = f"answer{secrets.token_hex(16)}"  # no message has it
        self._kept_ids = lru_cache(KEPT_CHATS)(self.ids)

    @property
    def chat_template(self) -> str:
        """The Jinja text, with which chats without tools are rendered."""
        return self._template or str(self.tokenizer.get_chat_template())

    def text(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """A chat's text. Raises ``BadRequest`` if the template refuses it."""
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **{**self._kwargs, **(kwargs or {})},
            )
        except jinja2.TemplateSyntaxError:
            raise  # of the template: nobody can be answered
        except Exception as error:  # whatever a template makes of what it does not expect
            said = " ".join(str(error).split())
            problem = f"the chat template refuses them ({type(error).__name__}: {said:.300})"
            raise BadRequest("messages", problem) from None
        return str(text)

    def ids(self, text: str) -> np.ndarray:
        """int32 [P]. The template writes the special tokens. Raises ``BadRequest``: before it is
        tokenised too, which takes 200 bytes of memory for each of its bytes."""
        self._check_length(text)
        try:
            ids = self._codec.encode(text)
        except (TypeError, UnicodeEncodeError) as error:  # such as half a surrogate pair
            raise BadRequest("messages", f"no text that can be tokenised ({error})") from None
        made = np.array(ids, dtype=np.int32)
        made.flags.writeable = False  # it may be kept
        return made

    def ids_of_chat(self, text: str) -> np.ndarray:
        """The same of a whole chat: all samples of a group begin with the same one, and it is
        tokenised once."""
        is_kept = len(text.encode("utf-8", "replace")) <= KEPT_BYTES
        return self._kept_ids(text) if is_kept else self.ids(text)

    def _check_length(self, text: str) -> None:
        if self.max_context is None or len(text) <= self.max_context:
            return
        num_bytes = len(text.encode("utf-8", "replace"))
        if num_bytes > self.max_context * self._longest_token:
            raise BadRequest(
                "messages",
                f"This model's maximum context length is {self.max_context} tokens, and no text of "
                f"{num_bytes} bytes has so few",
                code="context_length_exceeded",
            )

    def ids_behind(self, last_id: int, text: str) -> np.ndarray:
        """int32, of ``text`` that follows the token ``last_id``.

        Some tokenizers begin every text with a space of theirs: behind a special token, which no
        merge crosses, the text is tokenised together with it.
        """
        if last_id in self._special_ids:
            ids = self.ids(self.token_text(last_id) + text)
            for at in range(min(2, len(ids))):
                if ids[at] == last_id:
                    return ids[at + 1 :]
        return self.ids(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens, with no spaces tidied up."""
        return self._codec.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def ends_turn(self, token_id: int) -> bool:
        """Whether the model ends its turns with it; False where that is not known."""
        return self.end_ids is not None and token_id in self.end_ids

    @cached_property
    def turn_end(self) -> str:
        """The special token that the template ends a model's turn with; empty: none, as where the
        next turn's beginning says it."""
        chat = [{"role": "user", "content": "Question?"}]
        chat.append({"role": "assistant", "content": self.sentinel})
        try:
            _, _, behind = self.text(chat, generation_prompt=False).rpartition(self.sentinel)
            first = self.ids(behind.lstrip())[:1].tolist()
        except BadRequest:
            return ""
        return self.token_text(first[0]) if first and self.is_special(first[0]) else ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def has_special(self, token_ids: Sequence[int]) -> bool:
        return not self._special_ids.isdisjoint(token_ids)

    def _token_text(self, token_id: int) -> str:
        return self.decode([token_id])


def renderable(message: Message) -> dict[str, Any]:
    """A message as templates expect it: its content one text, arguments of tools objects.

    Raises ``BadRequest`` at a part that is no text.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = _text_of_parts(content)
    elif content is not None and not isinstance(content, str):
        raise BadRequest("messages", f"a content is a {type(content).__name__}, not a text")
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRequest("messages", "tool_calls is no list of objects")
        plain["tool_calls"] = [_renderable_call(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _text_of_parts(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest("messages", f"a part of type {kind!r:.80}; only text is supported")
        texts.append(text)
    return "\n".join(texts)  # as vLLM joins them


def _renderable_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("messages", "a tool call has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return call  # the template gets the text
        if isinstance(parsed, dict):
            return {**call, "function": {**function, "arguments": parsed}}
    return call
