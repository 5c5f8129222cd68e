"""The tokenizer of the policy, from disk; imports transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from easyrl.config import Config, ConfigError
from easyrl.gateway.errors import BadRequest
from easyrl.gateway.rendering import Renderer
from easyrl.runtime.user_code import describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# transformers makes an empty tokenizer of a folder without any
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy, from disk. Raises ``ConfigError``."""
    return read_tokenizer(config.model.tokenizer_path)


def read_tokenizer(folder: Path, key: str = "model.tokenizer") -> PreTrainedTokenizerBase:
    """The one in ``folder``, which ``key`` names. Raises ``ConfigError``."""
    from transformers import AutoTokenizer

    remedy = f"give a folder with a whole one ({', '.join(TOKENIZER_FILES)})"
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        raise ConfigError(f"{key}: {folder} has no tokenizer; {remedy}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of tokenizers, json, or transformers' conversions
        raise ConfigError(
            f"{key}: {folder} cannot be read ({describe(error):.150}); {remedy}"
        ) from error


def check_chat_template(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ``ConfigError`` if the template of environments' chats is not Jinja.

    There may be none: environments then use the token route.
    """
    own = config.data.chat_template
    if not config.environments or (own is None and tokenizer.chat_template is None):
        return
    key, file = (
        ("data.chat_template", own) if own else ("model.tokenizer", config.model.tokenizer_path)
    )
    try:
        text = None if own is None else own.read_text(encoding="utf-8")
        Renderer(tokenizer, text, config.data.chat_template_kwargs).text(
            [{"role": "user", "content": "Question?"}]
        )
    except BadRequest:
        pass  # refused is this chat; an environment's begin otherwise
    except jinja2.TemplateSyntaxError as error:
        remedy = "" if own else ", or give another one as data.chat_template"
        raise ConfigError(
            f"{key}: the chat template of {file} is not Jinja (its line {error.lineno}: "
            f"{error.message}), and environments are asked in chats; correct it{remedy}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {file} cannot be read ({describe(error):.150})") from error


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Text of token ids as they are: with special tokens, and no spaces tidied up."""
    return lambda token_ids: str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )
