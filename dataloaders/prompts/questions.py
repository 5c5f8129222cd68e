"""From a record to the text that is tokenised: its fields, prompt template and chat template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.records import BadRecordError, Record
from easyrl.dataloaders.prompts.template_values import combinations, placeholders
from easyrl.dataloaders.prompts.templates import (
    Message,
    Templates,
    field_of,
    prompt_messages,
    require_encodable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Question:
    """A record after field mapping and templates."""

    location: str  # the record's
    text: str  # the prompt field, or the last user message of a chat
    rendered: str  # what is tokenised
    answer: str | None
    metadata: Mapping[str, Any]  # the other fields, and the values of the templates' placeholders
    system: str = ""  # the system message, as it was filled; empty without one
    messages: list[Message] | None = None  # the prompt field, where it is a chat
    answer_column: Mapping[str, Any] = field(default_factory=dict)  # ``Prompt.answer_column``


class QuestionReader:
    """Checks the dataset's template settings once, then reads records.

    ``source_key`` is where the dataset sits in the configuration, for the messages. Raises
    ``ValueError`` if the settings and the tokenizer do not fit.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, source_key: str
    ) -> None:
        self.config, self.source_key = config, source_key
        self._templates = Templates(config, tokenizer, source_key)
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
            messages = prompt_messages(fields.prompt, prompt)
            prompt = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        if not isinstance(prompt, str):
            raise BadRecordError(
                f"field {fields.prompt!r} is of type {type(prompt).__name__}; it must be text or a "
                "list of chat messages"
            )
        texts = [message["content"] for message in messages] if messages else [prompt]
        if not texts[-1].strip():
            raise BadRecordError(f"field {fields.prompt!r} is empty; every prompt needs text")
        require_encodable(fields.prompt, texts)
        answer, answer_column = None, {}
        if fields.answer is not None:
            answer = self._answer(record, fields.answer)
            found = answer
            if self.config.answer_pattern is None:
                found = self._field(record, "answer", fields.answer)
            answer_column = {fields.answer.rpartition(".")[2]: found}
        used = {fields.prompt, fields.answer}
        metadata = {key: value for key, value in record.values.items() if key not in used}
        self._check_placeholders(messages, metadata)
        questions = []
        for values in self.combinations:
            system, rendered = self._templates.prompt(prompt, messages, values)
            with_values = {**metadata, **values}
            questions.append(
                Question(
                    record.location,
                    prompt,
                    rendered,
                    answer,
                    with_values,
                    system,
                    messages,
                    answer_column,
                )
            )
        return questions

    def _check_placeholders(
        self, messages: list[Message] | None, metadata: Mapping[str, Any]
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
        return field_of(record, name, f"{self.source_key}.fields.{field}")

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
