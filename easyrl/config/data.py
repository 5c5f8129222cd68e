"""Section ``data``: prompt files, their fields, and how a record becomes a tokenised prompt."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from easyrl.config.base import FilePath, Section

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]


class FieldsConfig(Section):
    """Names of the dataset's fields."""

    prompt: str = "prompt"  # a text, or a chat as a list of messages
    answer: str | None = "answer"  # for rewards; null: there is none


class DatasetConfig(Section):
    """Prompt files (.jsonl, .json array, .parquet) and how a record becomes a tokenised prompt."""

    files: list[FilePath] = []  # .jsonl, .json with an array, .parquet
    dataset: str | None = None  # in place of files: a dataset's id on the Hugging Face Hub, or a
    # folder that datasets.load_dataset reads
    subset: str | None = None  # of the dataset, where it has several
    split: str = "train"  # of the dataset; a part of one, too: train[:500]
    streaming: bool = False  # the first max_records of the dataset are read without fetching the
    # rest
    fields: FieldsConfig = FieldsConfig()
    answer_pattern: str | None = None  # regular expression; its first group is the answer
    system_prompt: str | None = None  # the system message; default: none
    prompt_template: str = "{prompt}"  # the user message
    template_values: dict[str, list[str | int | float]] = {}  # further placeholders {name} of the
    # two above: each prompt gets one value of the name's list, drawn by run.seed, its place in the
    # files and the epoch, and has it in its metadata
    apply_chat_template: bool = True  # false: the prompt's text as it is
    chat_template: FilePath | None = None  # a Jinja file; default: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = {}  # e.g. enable_thinking
    max_prompt_tokens: PositiveInt = 1024  # of a prompt, templates included
    on_long_prompt: Literal["skip", "fail"] = "skip"  # what to do with one that has more
    on_bad_record: Literal["fail", "skip"] = "fail"  # what to do with a record that cannot be read
    max_records: PositiveInt | None = None  # the first of all files together; default: all

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.files) == (self.dataset is not None):
            problem = "is empty; list one file at least, or give dataset"
            if self.files:
                problem = "dataset is given too; remove one of the two"
            raise ValueError(f"files: {problem}")
        if self.dataset is None:
            for key, default in (("subset", None), ("split", "train"), ("streaming", False)):
                if getattr(self, key) != default:
                    raise ValueError(f"{key}: has no effect with files; remove it, or give dataset")
        elif self.streaming and self.max_records is None:
            raise ValueError(
                "streaming: needs max_records: the order of the prompts and a run that is resumed "
                "want a known number of them; set it, or streaming=false"
            )
        return self

    @field_validator("prompt_template")
    @classmethod
    def _has_placeholder(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("must contain {prompt}")
        return value

    @field_validator("template_values", mode="before")
    @classmethod
    def _are_lists_of_values(cls, value: Any) -> Any:
        for name, choices in value.items() if isinstance(value, dict) else ():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)) or name == "prompt":
                raise ValueError(
                    f"{name!r} cannot be a placeholder; use letters, digits and _, not prompt"
                )
            if not isinstance(choices, list) or not choices:
                raise ValueError(f"{name} has no values; give a list with one at least")
            for choice in choices:
                if isinstance(choice, bool) or not isinstance(choice, str | int | float):
                    raise ValueError(
                        f"{name} has the value {choice!r}; give text or numbers (YAML reads on, "
                        "off, yes and no as true and false unless they stand in quotes)"
                    )
            if len(set(map(str, choices))) < len(choices):
                raise ValueError(f"{name} has a value twice ({choices}); remove one of the two")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _is_regex_with_group(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}; correct it") from None
        if groups < 1:
            raise ValueError("needs one group, such as '#### (.+)'")
        return value

    @model_validator(mode="after")
    def _chat_keys(self) -> Self:
        for key in ("system_prompt", "chat_template", "chat_template_kwargs"):
            if not self.apply_chat_template and getattr(self, key):
                raise ValueError(f"{key}: has no effect without a chat template; remove it")
        return self

    @model_validator(mode="after")
    def _values_have_a_place(self) -> Self:
        for name in self.template_values:
            if f"{{{name}}}" not in self.prompt_template + (self.system_prompt or ""):
                raise ValueError(
                    f"template_values: {{{name}}} is in neither prompt_template nor "
                    "system_prompt; write it where the model has to read it, or remove it"
                )
        return self


class DataConfig(DatasetConfig):
    """The training prompts."""

    shuffle: bool = True  # each epoch in an order of its own, by run.seed
    epochs: PositiveInt = 1  # passes through the prompts, unless trainer.max_steps is given
    max_excluded: float = Field(0.05, ge=0, le=1)  # of the last max(100, trainer.batch_size)
    # prompts, how many endpoints may refuse before the run stops; prompts too long for every
    # endpoint's context do not count
    tool_parser: ToolParserName = "auto"  # how the model writes tool calls, named as in vLLM, for
    # environments; auto: as the chat template shows it
