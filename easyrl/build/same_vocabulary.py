"""Whether teacher and critic read what the policy writes: the same tokens under the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from easyrl.config import Config, ConfigError
from easyrl.models.supported import vocabulary_size
from easyrl.models.teacher_loading import vocabulary_size_at
from easyrl.recipes.loading import load_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    ReadTokenizer = Callable[[Path, str], PreTrainedTokenizerBase]

REMEDY = "use a model of the policy's vocabulary"


def check_vocabularies(
    config: Config, tokenizer: PreTrainedTokenizerBase, read_tokenizer: ReadTokenizer
) -> None:
    """Compares the recipe's teacher and the critic, where they have folders of their own, with the
    policy; reads no weight.

    ``tokenizer`` is the policy's, ``read_tokenizer(folder, key)`` reads another. Raises
    ``ConfigError`` naming ``recipe.teacher`` or ``critic.path`` where its folder holds no model
    that can run on packed rows, or one of another vocabulary.
    """
    needs = load_recipe(config).needs
    if needs.teacher is not None:
        own, its = sizes = _sizes(config, needs.teacher.path, "recipe.teacher")
        # ids that the policy may sample have to be among the teacher's; rows behind them are
        # padding, which only whole distributions would compare
        is_right = own == its if needs.teacher.full else own <= its
        if not is_right:
            raise _other_size(config, needs.teacher.path, "recipe.teacher", sizes)
        _check_tokens(needs.teacher.path, "recipe.teacher", tokenizer, read_tokenizer)
    if needs.critic and config.critic.path is not None:
        own, its = sizes = _sizes(config, config.critic.path, "critic.path")
        if own > its:
            raise _other_size(config, config.critic.path, "critic.path", sizes)
        _check_tokens(config.critic.path, "critic.path", tokenizer, read_tokenizer)


def _sizes(config: Config, path: Path, key: str) -> tuple[int, int]:
    """Rows of the policy's embedding and of that of the model at ``path``."""
    return vocabulary_size(config.model), vocabulary_size_at(config.model, path, key)


def _other_size(config: Config, path: Path, key: str, sizes: tuple[int, int]) -> ConfigError:
    own, its = sizes
    return ConfigError(
        f"{key}: {path} has a vocabulary of {its} ids, model.path {config.model.path} one of "
        f"{own}; {REMEDY}"
    )


def _check_tokens(
    path: Path, key: str, tokenizer: PreTrainedTokenizerBase, read_tokenizer: ReadTokenizer
) -> None:
    """Raises ``ConfigError``."""
    known, there = tokenizer.get_vocab(), read_tokenizer(path, key).get_vocab()
    if known != there:
        raise ConfigError(f"{key}: {path} has other tokens, {_first(known, there)}; {REMEDY}")


def _first(own: dict[str, int], its: dict[str, int]) -> str:
    """The token of the lowest id that has another id there, in words."""
    differing = [token for token in own.keys() | its.keys() if own.get(token) != its.get(token)]

    def lowest(token: str) -> tuple[int, str]:
        return min(each[token] for each in (own, its) if token in each), token

    def said(ids: dict[str, int], token: str) -> str:
        return str(ids[token]) if token in ids else "none"

    first = min(differing, key=lowest)
    return f"{first!r} first: its id is {said(its, first)}, the policy's is {said(own, first)}"
