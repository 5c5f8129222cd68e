"""From a record to the text that is tokenised: its fields, prompt template and chat template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.records import BadRecordError, Record
from easyrl.dataloaders.prompts.template_values import (
    Value,
    combinations,
    filled,
    placeholders,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Question:
    """A record after field mapping and templates."""

    location: str  # the record's
    text: str  # the prompt field, or the last user message of a chat
    rendered: str  # what is tokenised
    answer: str | None
    metadata: Mapping[str, Any]  # the other fields, and the values of the templates' placeholders
    system: str = ""  # the system message, as it was filled; empty without one


class QuestionReader:
    """Checks the dataset's template settings once, then reads records.

    ``source_key`` is where the dataset sits in the configuration, for the messages. Raises
    ``ValueError`` if the settings and the tokenizer do not fit.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, source_key: str
    ) -> None:
        self.config, self.tokenizer, self.source_key = config, tokenizer, source_key
        self.chat_template: str | None = None
        if config.chat_template is not None:
            if not config.chat_template.is_file():
                raise ValueError(
                    f"{source_key}.chat_template: {config.chat_template} does not exist"
                )
            try:
                self.chat_template = config.chat_template.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{source_key}.chat_template: {config.chat_template} is not UTF-8 text "
                    f"({error.reason}); convert the file (iconv does)"
                ) from None
        elif config.apply_chat_template and tokenizer.chat_template is None:
            raise ValueError(
                f"{source_key}.apply_chat_template: the tokenizer has no chat template; give one "
                f"as {source_key}.chat_template or set {source_key}.apply_chat_template=false"
            )
        reserved = {"conversation", "tokenize", "add_generation_prompt", "chat_template"}
        if clash := sorted(reserved & config.chat_template_kwargs.keys()):
            raise ValueError(
                f"{source_key}.chat_template_kwargs: {clash} are set by EasyRL; remove"
            )

        self.combinations = combinations(config.template_values)

    def __call__(self, record: Record) -> list[Question]:
        """One question for every combination of the values in ``template_values``.

        Raises ``BadRecordError`` if the record is damaged, a field missing, empty or wrongly typed,
        or if the chat template refuses it.
        """
        if record.problem is not None:
            raise BadRecordError(record.problem)
        fields = self.config.fields
        prompt = self._field(record, "prompt", fields.prompt)
        messages = None
        if isinstance(prompt, list):
            messages = _messages(fields.prompt, prompt)
            prompt = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        if not isinstance(prompt, str):
            raise BadRecordError(
                f"field {fields.prompt!r} is of type {type(prompt).__name__}; it must be text or a "
                "list of chat messages"
            )
        texts = [message["content"] for message in messages] if messages else [prompt]
        if not texts[-1].strip():
            raise BadRecordError(f"field {fields.prompt!r} is empty; every prompt needs text")
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise BadRecordError(
                f"field {fields.prompt!r} has half a surrogate pair at character {error.start}, "
                "which no tokenizer takes; repair the text"
            ) from None
        answer = None if fields.answer is None else self._answer(record, fields.answer)
        used = {fields.prompt, fields.answer}
        metadata = {key: value for key, value in record.values.items() if key not in used}
        self._check_placeholders(messages, metadata)
        questions = []
        for values in self.combinations:
            system, rendered = self._render(prompt, messages, values)
            with_values = {**metadata, **values}
            questions.append(
                Question(record.location, prompt, rendered, answer, with_values, system)
            )
        return questions

    def _check_placeholders(
        self, messages: list[dict[str, Any]] | None, metadata: Mapping[str, Any]
    ) -> None:
        """Raises ``BadRecordError`` if a drawn value could not be read, or hid a field."""
        choices, key = self.config.template_values, self.source_key
        if clash := sorted(choices.keys() & metadata):
            raise BadRecordError(
                f"has a field {clash[0]!r}, which {key}.template_values draws; rename one of them"
            )
        if not messages:
            return
        has_system = messages[0]["role"] == "system"
        read = "" if has_system else self.config.system_prompt or ""
        if unread := sorted(choices.keys() - placeholders(read, choices)):
            why = "has a system message of its own" if has_system else "is a chat"
            raise BadRecordError(
                f"the prompt {why}, so that {{{unread[0]}}} of {key}.template_values would not be "
                f"read: {key}.prompt_template is for plain text, and {key}.system_prompt for chats "
                "without a system message"
            )

    def _field(self, record: Record, field: str, name: str) -> Any:
        """A field by its name, else by the dotted path ``outer.inner``."""
        if name in record.values:
            return record.values[name]
        value: Any = record.values
        for part in name.split("."):
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            present = ", ".join(record.values) or "none"
            raise BadRecordError(
                f"has no field {name!r}; its fields are: {present} "
                f"(set {self.source_key}.fields.{field})"
            )
        return value

    def _answer(self, record: Record, name: str) -> str:
        value = self._field(record, "answer", name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 18.0 from a column of floats is the answer 18
        nan = isinstance(value, float) and not math.isfinite(value)
        if nan or isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = "null" if value is None else "not a number" if nan else type(value).__name__
            raise BadRecordError(
                f"field {name!r} is {kind}; an answer is text or a number (data without answers: "
                f"{self.source_key}.fields.answer=null)"
            )
        answer, pattern = str(value), self.config.answer_pattern
        if pattern is not None:
            matches = list(re.finditer(pattern, answer))
            if not matches or matches[-1][1] is None:
                raise BadRecordError(
                    f"field {name!r} does not match {pattern!r}; repair the record or change "
                    f"{self.source_key}.answer_pattern"
                )
            answer = matches[-1][1]
        answer = answer.strip()
        if not answer:
            raise BadRecordError(
                f"field {name!r} gives an empty answer; repair or remove the record"
            )
        return answer

    def _render(
        self, prompt: str, messages: list[dict[str, Any]] | None, values: Mapping[str, Value]
    ) -> tuple[str, str]:
        """The system message, and the whole text that is tokenised."""
        config = self.config
        user_message = filled(config.prompt_template, {**values, "prompt": prompt})
        if not config.apply_chat_template:
            if messages is not None:
                raise BadRecordError(
                    f"the prompt is a chat; set {self.source_key}.apply_chat_template=true or "
                    "give plain text"
                )
            return "", user_message
        messages = messages or [{"role": "user", "content": user_message}]
        if config.system_prompt is not None and messages[0]["role"] != "system":
            system_prompt = filled(config.system_prompt, values)
            messages = [{"role": "system", "content": system_prompt}, *messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **config.chat_template_kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.source_key}.chat_template: is not Jinja ({error})") from error
        except jinja2.TemplateError as error:
            raise BadRecordError(
                f"the chat template refuses the prompt ({error}); check roles and "
                f"{self.source_key}.system_prompt, or correct {self.source_key}.chat_template"
            ) from error
        assert isinstance(text, str)
        return messages[0]["content"] if messages[0]["role"] == "system" else "", text


def _messages(name: str, items: list[Any]) -> list[dict[str, Any]]:
    for item in items:
        if not (
            isinstance(item, dict)
            and isinstance(item.get("role"), str)
            and isinstance(item.get("content"), str)
        ):
            raise BadRecordError(
                f"field {name!r} is a list but not of chat messages; each needs a role and a "
                "content, both text"
            )
    if not items or items[-1]["role"] == "assistant":
        raise BadRecordError(
            f"the chat in field {name!r} leaves nothing to answer; it must end with a message "
            "that is not the assistant's"
        )
    # A parquet struct has every key in every row, None where a message lacks it.
    return [{k: v for k, v in item.items() if v is not None} for item in items]
