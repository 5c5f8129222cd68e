"""Which fields of a record are the question and the answer (``DatasetConfig.fields``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.records import BadRecordError, Record

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Question:
    """A record after the field mapping, before any template."""

    location: str  # the record's
    text: str  # the prompt field, or the last user message of a chat
    messages: tuple[Mapping[str, Any], ...] | None  # if the prompt field holds a chat
    answer: str | None
    metadata: Mapping[str, Any]  # the other fields


def read_question(record: Record, config: DatasetConfig, source_key: str) -> Question:
    """Raises ``BadRecordError`` if the record is damaged, a field missing, empty or wrongly typed.

    ``source_key`` is where the dataset sits in the configuration, for the messages.
    """
    if record.problem is not None:
        raise BadRecordError(record.problem)
    fields = config.fields
    prompt = _field(record, fields.prompt, f"{source_key}.fields.prompt")
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
            f"field {fields.prompt!r} has half a surrogate pair at character {error.start}, which "
            "no tokenizer takes; repair the text"
        ) from None
    answer = None if fields.answer is None else _answer(record, config, source_key)
    used = {fields.prompt, fields.answer}
    metadata = {key: value for key, value in record.values.items() if key not in used}
    return Question(record.location, prompt, messages, answer, metadata)


def _field(record: Record, name: str, config_key: str) -> Any:
    """A field by its name, else by the dotted path ``outer.inner``."""
    if name in record.values:
        return record.values[name]
    value: Any = record.values
    for part in name.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    if value is _MISSING:
        present = ", ".join(record.values) or "none"
        raise BadRecordError(f"has no field {name!r}; its fields are: {present} (set {config_key})")
    return value


def _messages(name: str, items: list[Any]) -> tuple[Mapping[str, Any], ...]:
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
    return tuple({k: v for k, v in item.items() if v is not None} for item in items)


def _answer(record: Record, config: DatasetConfig, source_key: str) -> str:
    name = config.fields.answer
    assert name is not None
    value = _field(record, name, f"{source_key}.fields.answer")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 18.0 from a column of floats is the answer 18
    nan = isinstance(value, float) and not math.isfinite(value)
    if nan or isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "null" if value is None else "not a number" if nan else type(value).__name__
        raise BadRecordError(
            f"field {name!r} is {kind}; an answer is text or a number (data without answers: "
            f"{source_key}.fields.answer=null)"
        )
    answer = str(value)
    if config.answer_pattern is not None:
        matches = list(re.finditer(config.answer_pattern, answer))
        if not matches or matches[-1][1] is None:
            raise BadRecordError(
                f"field {name!r} does not match {config.answer_pattern!r}; repair the record or "
                f"change {source_key}.answer_pattern"
            )
        answer = matches[-1][1]
    if not answer.strip():
        raise BadRecordError(f"field {name!r} gives an empty answer; repair or remove the record")
    return answer.strip()
