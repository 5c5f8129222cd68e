"""From a record to the text of a prompt and its given completions, and which of it is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from easyrl.config.records import RecordDatasetConfig, RecordFormat
from easyrl.dataloaders.prompts.records import BadRecordError, Record
from easyrl.dataloaders.prompts.templates import (
    Message,
    Templates,
    chat_messages,
    field_of,
    prompt_messages,
    require_encodable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The fields by which a record is known to be of a format, by their keys in ``data.fields``.
FIELDS: dict[RecordFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "preference": ("chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "question": ("question", "answer"),
}
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TextSpan(NamedTuple):
    """A piece of a completion."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """A record after field mapping and templates."""

    location: str  # the record's
    prompt: str
    completions: tuple[tuple[TextSpan, ...], ...]  # each ends with a span that is trained


class ConversationReader:
    """Reads records of one format, which the first one decides where ``format`` is auto.

    ``source_key`` is where the dataset sits in the configuration, for the messages. Raises
    ``ValueError`` if the settings and the tokenizer do not fit.
    """

    def __init__(
        self, config: RecordDatasetConfig, tokenizer: PreTrainedTokenizerBase, source_key: str
    ) -> None:
        self._config, self._key = config, source_key
        self._tokenizer = tokenizer
        self._templates = Templates(config, tokenizer, source_key)
        self._format: RecordFormat | None = None if config.format == "auto" else config.format
        self._has_marks = config.apply_chat_template and bool(
            _GENERATION_MARK.search(self._templates.chat_template)
        )

    @property
    def format(self) -> RecordFormat | None:
        """Of the records; None: none has been read."""
        return self._format

    def __call__(self, record: Record) -> Conversation:
        """Raises ``BadRecordError`` if the record is damaged, a field missing, empty or wrongly
        typed, or if the chat template refuses it; ``ValueError`` if no format fits the first one.
        """
        if record.problem is not None:
            raise BadRecordError(record.problem)
        if self._format is None:
            self._format = self._format_of(record)
        if self._format == "messages":
            return self._whole_chat(record)
        if self._format == "preference":
            return self._pair(record)
        prompt, answer = FIELDS[self._format]
        completion = self._completion(
            self._prompt(prompt, self._field(record, prompt)),
            answer,
            self._field(record, answer),
        )
        return Conversation(record.location, completion[0], (completion[1],))

    # ---- formats ----

    def _format_of(self, record: Record) -> RecordFormat:
        for name, fields in FIELDS.items():
            if all(self._name(field) in record.values for field in fields):
                return name
        known = "; ".join(
            f"{name}: {' and '.join(map(self._name, fields))}" for name, fields in FIELDS.items()
        )
        raise ValueError(
            f"{record.location}: its fields ({', '.join(record.values) or 'none'}) are those of no "
            f"format ({known}); name them in {self._key}.fields, or set {self._key}.format"
        )

    def _whole_chat(self, record: Record) -> Conversation:
        """Every turn of the assistant is trained."""
        name = self._name("messages")
        value = self._field(record, "messages")
        if not isinstance(value, list):
            raise BadRecordError(
                f"field {name!r} is of type {type(value).__name__}; it must be a list of chat "
                "messages"
            )
        messages = chat_messages(name, value)
        if not messages:
            raise BadRecordError(f"the chat in field {name!r} is empty; remove the record")
        messages = self._templates.messages("", messages, {})
        prompt, spans = self._chat(messages, 0, name)
        return Conversation(record.location, prompt, (spans,))

    def _pair(self, record: Record) -> Conversation:
        """Chosen, then rejected, behind the prompt that they share."""
        prompt = self._pair_prompt(record)
        (first, chosen), (second, rejected) = (
            self._completion(prompt, field, self._field(record, field))
            for field in FIELDS["preference"]
        )
        if first != second:
            raise BadRecordError(
                "the chat template renders the prompt in front of chosen otherwise than in front "
                f"of rejected; give another {self._key}.chat_template"
            )
        if chosen == rejected:
            raise BadRecordError(
                f"fields {self._name('chosen')!r} and {self._name('rejected')!r} are the same, "
                "neither is preferred; remove the record"
            )
        return Conversation(record.location, first, (chosen, rejected))

    def _pair_prompt(self, record: Record) -> str | list[Message]:
        """The field of the prompt; without one, the messages with which both chats begin."""
        name = self._name("prompt")
        if name in record.values:
            return self._prompt("prompt", record.values[name])
        chats = [self._field(record, field) for field in FIELDS["preference"]]
        if not all(isinstance(chat, list) for chat in chats):
            raise BadRecordError(
                f"has no field {name!r}, which texts need (set {self._key}.fields.prompt); chats "
                "may have it in front of both answers"
            )
        shared = 0
        while shared < min(map(len, chats)) and chats[0][shared] == chats[1][shared]:
            shared += 1
        if not shared:
            raise BadRecordError(
                f"has no field {name!r}, and its two chats begin with different messages; both "
                "have to answer the same prompt"
            )
        return self._prompt("prompt", chats[0][:shared])

    # ---- fields ----

    def _name(self, field: str) -> str:
        name: str = getattr(self._config.fields, field)
        return name

    def _field(self, record: Record, field: str) -> Any:
        return field_of(record, self._name(field), f"{self._key}.fields.{field}")

    def _prompt(self, field: str, value: Any) -> str | list[Message]:
        """Text, or messages of which the last is not the assistant's."""
        name = self._name(field)
        if isinstance(value, list):
            messages = prompt_messages(name, value)
            texts = [message["content"] for message in messages]
            require_encodable(name, texts)
            if not texts[-1].strip():
                raise BadRecordError(f"field {name!r} is empty; every prompt needs text")
            return messages
        self._require_text(name, value, "every prompt needs text", "text or a list of messages")
        return str(value)

    def _require_text(self, name: str, value: Any, need: str, types: str) -> None:
        if not isinstance(value, str):
            kind = "null" if value is None else f"of type {type(value).__name__}"
            raise BadRecordError(f"field {name!r} is {kind}; it must be {types}")
        if not value.strip():
            raise BadRecordError(f"field {name!r} is empty; {need}")
        require_encodable(name, [value])

    # ---- what is trained ----

    def _completion(
        self, prompt: str | list[Message], field: str, value: Any
    ) -> tuple[str, tuple[TextSpan, ...]]:
        """A prompt, rendered, and the completion in ``field`` behind it."""
        name = self._name(field)
        text, messages = (prompt, None) if isinstance(prompt, str) else ("", prompt)
        if isinstance(value, list) and self._config.apply_chat_template:
            answer = chat_messages(name, value)
            asked = messages or [{"role": "user", "content": text}]
            if answer[: len(asked)] == asked:  # the whole conversation
                answer = answer[len(asked) :]
            if not answer or answer[0]["role"] != "assistant":
                raise BadRecordError(
                    f"field {name!r} has no message of the assistant behind the prompt; it must "
                    "begin with one, or with all of the prompt's messages"
                )
        else:
            needed = "text or a list of messages"
            if not self._config.apply_chat_template:
                needed = f"text with {self._key}.apply_chat_template=false"
            self._require_text(name, value, "there is nothing to train", needed)
            answer = [{"role": "assistant", "content": value}]
        if not self._config.apply_chat_template:
            _, rendered = self._templates.prompt(text, messages, {})
            return rendered, (TextSpan(value, True),)
        chat = self._templates.messages(text, messages, {})
        return self._chat([*chat, *answer], len(chat), name)

    def _chat(
        self, messages: list[Message], first: int, name: str
    ) -> tuple[str, tuple[TextSpan, ...]]:
        """A chat up to its first trained turn, and the rest up to the end of its last.

        Trained are the assistant's turns from message ``first`` on; ``name`` is their field.
        """
        if not self._config.apply_chat_template:
            raise BadRecordError(
                f"field {name!r} is a chat; set {self._key}.apply_chat_template=true, or give "
                f"prompts and completions as texts ({self._key}.format=completion)"
            )
        require_encodable(name, [message["content"] for message in messages])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in turns if i >= first]
        if not trained:
            raise BadRecordError(
                f"field {name!r} has no message of the assistant; there is nothing to train"
            )
        if trained[0] == 0:
            raise BadRecordError(
                f"field {name!r} begins with a message of the assistant, which answers nothing; "
                "put the prompt before it"
            )
        for i in trained:
            if not messages[i]["content"].strip():
                raise BadRecordError(
                    f"field {name!r}: message {i + 1}, the assistant's, is empty; there is nothing "
                    "to train"
                )
        messages = messages[: trained[-1] + 1]  # nothing is trained behind it
        find = self._marked_turns if self._has_marks else self._turns_by_prefix
        text, bounds = find(messages, turns)
        bounds = bounds[len(turns) - len(trained) :]
        spans = []
        end = bounds[0][0]
        for start, stop in bounds:
            if start > end:
                spans.append(TextSpan(text[end:start], False))
            spans.append(TextSpan(text[start:stop], True))
            end = stop
        return text[: bounds[0][0]], tuple(spans)

    def _marked_turns(
        self, messages: Sequence[Message], turns: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat, and where the template says that the assistant's turns are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = self._tokenizer.special_tokens_map
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._templates.chat_template,
                return_assistant_tokens_mask=True,
                **{**special, **self._config.chat_template_kwargs},
            )
        except jinja2.TemplateError as error:
            raise self._templates.refused(error) from error
        (text,), (marks,) = rendered
        bounds = [(int(start), int(end)) for start, end in marks]
        if len(bounds) != len(turns) or any(start >= end for start, end in bounds):
            raise BadRecordError(
                f"the chat template marks {len(bounds)} turns with {{% generation %}}, the chat "
                f"has {len(turns)} of the assistant; correct {self._key}.chat_template"
            )
        return text, bounds

    def _turns_by_prefix(
        self, messages: Sequence[Message], turns: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat, and what each of the assistant's turns adds to what comes before it."""
        text = self._templates.chat(messages, add_generation_prompt=False)
        bounds = []
        for i in turns:
            before = self._templates.chat(messages[:i], add_generation_prompt=True)
            behind = self._templates.chat(messages[: i + 1], add_generation_prompt=False)
            if not (text.startswith(behind) and behind.startswith(before) and behind != before):
                shorter = before if text.startswith(behind) else behind
                raise BadRecordError(
                    f"the chat template is not prefix-stable: it renders the first {i + 1} "
                    f"messages otherwise when {_what_follows(i, messages)} "
                    f"({_difference(text, shorter)}), so that the tokens of turns cannot be told; "
                    f"give a {self._key}.chat_template with {{% generation %}} around the "
                    "assistant's turns, or records with one turn"
                )
            bounds.append((len(before), len(behind)))
        return text, bounds


def _what_follows(i: int, messages: Sequence[Message]) -> str:
    return "others follow" if i + 1 < len(messages) else "the answer follows its generation prompt"


def _difference(whole: str, part: str) -> str:
    """Where ``part`` is not how ``whole`` begins."""
    pairs = zip(whole, part, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), len(whole))
    return f"character {at}: {whole[at : at + 20]!r} and {part[at : at + 20]!r}"
