"""What a record's fields are rendered with: prompt template, system prompt, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.records import BadRecordError, Record
from easyrl.dataloaders.prompts.template_values import Value, filled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # with a role and a content, both text
_MISSING = object()


class Templates:
    """A dataset's template settings, checked once.

    ``source_key`` is where the dataset sits in the configuration, for the messages. Raises
    ``ValueError`` if the settings and the tokenizer do not fit.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, source_key: str
    ) -> None:
        self.config, self.tokenizer, self.source_key = config, tokenizer, source_key
        self._own: str | None = None  # else the tokenizer's
        if config.chat_template is not None:
            if not config.chat_template.is_file():
                raise ValueError(
                    f"{source_key}.chat_template: {config.chat_template} does not exist"
                )
            try:
                self._own = config.chat_template.read_text(encoding="utf-8")
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

    @property
    def chat_template(self) -> str:
        """The Jinja text that chats are rendered with."""
        return self._own or self.tokenizer.get_chat_template()

    def prompt(
        self, text: str, messages: Sequence[Message] | None, values: Mapping[str, Value]
    ) -> tuple[str, str]:
        """The system message, empty without one, and what is tokenised of a prompt.

        The prompt is ``text`` or ``messages``, ``values`` those of the templates' placeholders; it
        ends where a response begins. Raises ``BadRecordError`` if the chat template refuses it.
        """
        if not self.config.apply_chat_template:
            if messages is not None:
                raise BadRecordError(
                    f"the prompt is a chat; set {self.source_key}.apply_chat_template=true or "
                    "give plain text"
                )
            return "", self._user_message(text, values)
        chat = self.messages(text, messages, values)
        system = chat[0]["content"] if chat[0]["role"] == "system" else ""
        return system, self.chat(chat, add_generation_prompt=True)

    def messages(
        self, text: str, messages: Sequence[Message] | None, values: Mapping[str, Value]
    ) -> list[Message]:
        """The chat of a prompt, with the system prompt where it has none of its own."""
        chat = list(messages or [{"role": "user", "content": self._user_message(text, values)}])
        if self.config.system_prompt is not None and chat[0]["role"] != "system":
            system_prompt = filled(self.config.system_prompt, values)
            chat = [{"role": "system", "content": system_prompt}, *chat]
        return chat

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """``messages`` rendered. Raises ``BadRecordError`` if the chat template refuses them."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._own,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.config.chat_template_kwargs,
            )
        except jinja2.TemplateError as error:
            raise self.refused(error) from error
        assert isinstance(text, str)
        return text

    def refused(self, error: jinja2.TemplateError) -> ValueError:
        """What to raise for ``error``: of the template itself, or of the record."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return ValueError(f"{self.source_key}.chat_template: is not Jinja ({error})")
        return BadRecordError(
            f"the chat template refuses the prompt ({error}); check roles and "
            f"{self.source_key}.system_prompt, or correct {self.source_key}.chat_template"
        )

    def _user_message(self, text: str, values: Mapping[str, Value]) -> str:
        return filled(self.config.prompt_template, {**values, "prompt": text})


def field_of(record: Record, name: str, key: str) -> Any:
    """A field by its name, else by the dotted path ``outer.inner``.

    ``key``: of the configuration, that names it. Raises ``BadRecordError`` without it.
    """
    if name in record.values:
        return record.values[name]
    value: Any = record.values
    for part in name.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    if value is _MISSING:
        present = ", ".join(record.values) or "none"
        raise BadRecordError(f"has no field {name!r}; its fields are: {present} (set {key})")
    return value


def chat_messages(name: str, items: Sequence[Any]) -> list[Message]:
    """``items`` of the field ``name`` as messages. Raises ``BadRecordError`` if they are none."""
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
    # A parquet struct has every key in every row, None where a message lacks it.
    return [{k: v for k, v in item.items() if v is not None} for item in items]


def prompt_messages(name: str, items: Sequence[Any]) -> list[Message]:
    """As ``chat_messages``, of a prompt: the last one is not the assistant's."""
    messages = chat_messages(name, items)
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRecordError(
            f"the chat in field {name!r} leaves nothing to answer; it must end with a message "
            "that is not the assistant's"
        )
    return messages


def require_encodable(name: str, texts: Sequence[str]) -> None:
    """Raises ``BadRecordError`` if one of the field's ``texts`` is none that can be tokenised."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError(
            f"field {name!r} has half a surrogate pair at character {error.start}, which no "
            "tokenizer takes; repair the text"
        ) from None
