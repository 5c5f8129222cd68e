"""From a question to the text that is tokenised: prompt template, system prompt, chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jinja2

from easyrl.config import DatasetConfig
from easyrl.dataloaders.prompts.fields import Question
from easyrl.dataloaders.prompts.records import BadRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptRenderer:
    """Checks the dataset's template settings once, then renders questions.

    Raises ``ValueError`` if the settings and the tokenizer do not fit.
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
            self.chat_template = config.chat_template.read_text(encoding="utf-8")
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

    def __call__(self, question: Question) -> str:
        """Raises ``BadRecordError`` if the template refuses the record."""
        config = self.config
        # Not str.format: templates are full of LaTeX braces.
        user_message = config.prompt_template.replace("{prompt}", question.text)
        if not config.apply_chat_template:
            if question.messages is not None:
                raise BadRecordError(
                    f"the prompt is a chat; set {self.source_key}.apply_chat_template=true or "
                    "give plain text"
                )
            return user_message
        messages: list[Any] = list(question.messages or [{"role": "user", "content": user_message}])
        if config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
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
                f"{self.source_key}.system_prompt"
            ) from error
        assert isinstance(text, str)
        return text
