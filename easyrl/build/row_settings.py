"""How a run's models see rows: ``auto`` of ``trainer.packing`` and ``model.attention`` decided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from transformers import PreTrainedConfig

from easyrl.config import Config, ConfigError
from easyrl.config.records import RecordsConfig
from easyrl.models.loading import path_errors_named
from easyrl.models.row_check import row_verdict
from easyrl.models.supported import (
    ARCHITECTURES,
    architecture_of,
    read_model_config,
    require_known_packed,
    rope_limit_of,
    sliding_window_of,
)
from easyrl.recipes.loading import load_recipe


def decide_row_settings(config: Config) -> tuple[Config, list[str]]:
    """``config`` with ``auto`` of ``trainer.packing`` decided, and what to say of that.

    A function of the configuration and the models' ``config.json``, so equal on all ranks and in a
    run that is resumed. Policy, critic and teacher see the same rows: all of them are asked.

    Raises ``ConfigError`` naming the key that cannot be had: a model whose log-probabilities would
    not be its own, an explicit packing or attention that a model cannot run with.
    """
    trainer, attention = config.trainer, config.model.attention
    if config.parallel.is_split:
        require_known_packed(read_model_config(config.model), config.model)
        return _decided(config, sharing(config)), []
    problem = None
    for key, path in _models(config):
        with path_errors_named(key):
            hf_config = read_model_config(config.model.model_copy(update={"path": path}))
        longest = longest_sequence(config)
        if has_episodes(config):  # as long as the model's context
            longest = max(longest, int(hf_config.max_position_embeddings))
        _check_padded(key, path, hf_config, longest)
        found = packed_obstacle(hf_config, longest)
        problem = problem or (found and f"{path} is a {architecture_of(hf_config)}: {found}")
        _check_offload(config, hf_config)
    if attention == "own":
        return _decided(config, "none"), []
    if problem is None:
        return _decided(config, sharing(config)), []
    if trainer.packing in ("prompt", "tree"):
        raise ConfigError(f"trainer.packing: {trainer.packing} cannot be had, {problem}; use none")
    if attention != "auto":
        raise ConfigError(
            f"model.attention: {attention} cannot be had, {problem}; use auto, or own (the model's)"
        )
    model = config.model.model_copy(update={"attention": "own"})
    decided = _decided(config.model_copy(update={"model": model}), "none")
    return decided, [_notice(config, problem)] if trainer.packing == "auto" else []


def sharing(config: Config) -> Literal["prompt", "tree", "none"]:
    """The packing of models that can share: ``auto`` is ``tree`` for episodes, whose turns share
    more than a prompt, and else ``prompt``."""
    if config.trainer.packing != "auto":
        return config.trainer.packing
    return "tree" if has_episodes(config) else "prompt"


def has_episodes(config: Config) -> bool:
    """Whether a sample is an episode, so that its tokens are not one prompt and one answer."""
    return config.source == "rollouts" and bool(config.environments)


def packed_obstacle(config: PreTrainedConfig, longest: int) -> str | None:
    """Why a model cannot run on packed rows of sequences up to ``longest``; None: it can."""
    window = sliding_window_of(config)
    if window is not None and window < longest:
        return (
            f"its sliding window of {window} tokens is shorter than the longest sequence, {longest}"
        )
    return row_verdict(config).packed


def longest_sequence(config: Config) -> int:
    """Tokens of a prompt with one response, at most; an episode may have more."""
    if isinstance(config, RecordsConfig):
        return int(config.data.max_tokens)
    return config.data.max_prompt_tokens + config.rollout.max_tokens


def _models(config: Config) -> Iterator[tuple[str, Path]]:
    """Key and folder of each model that is run on the rows."""
    yield "model.path", config.model.path
    needs = load_recipe(config).needs
    if needs.critic and config.critic.path is not None:
        yield "critic.path", config.critic.path
    if needs.teacher is not None:
        yield "recipe.teacher", needs.teacher.path


def _check_padded(key: str, path: Path, config: PreTrainedConfig, longest: int) -> None:
    name = architecture_of(config)
    limit = rope_limit_of(config)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"{key}: {path} is a {name} whose rotary frequencies depend on a forward's longest "
            f"sequence beyond {limit} tokens, and sequences of this run have up to {longest}; "
            "lower data.max_prompt_tokens or rollout.max_tokens, or use a model without them"
        )
    if (problem := row_verdict(config).padded) is not None:
        raise ConfigError(
            f"{key}: {path} is a {name} that cannot be trained: {problem}; use another model"
        )


def _check_offload(config: Config, hf_config: PreTrainedConfig) -> None:
    if config.trainer.offload_reference and architecture_of(hf_config) not in ARCHITECTURES:
        raise ConfigError(
            f"trainer.offload_reference: a {architecture_of(hf_config)} cannot be run layer by "
            f"layer; supported are {', '.join(ARCHITECTURES)}; remove it"
        )


def _decided(config: Config, packing: str) -> Config:
    trainer = config.trainer.model_copy(update={"packing": packing})
    return config.model_copy(update={"trainer": trainer})


def _notice(config: Config, problem: str) -> str:
    times = 1 if isinstance(config, RecordsConfig) else config.rollout.num_generations
    return (
        f"trainer.packing: none, by the model's own attention ({problem}). The prompt goes through "
        f"the model {times} times instead of once for each group"
        f"{_cost(config) if times > 1 else ''}; of losses and gradients nothing changes"
    )


def _cost(config: Config) -> str:
    """Tokens of a group without sharing, relative to those with."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    times = config.rollout.num_generations
    ratio = times * (prompt + response) / (prompt + times * response)
    return f", up to {ratio:.1f} times the tokens at the longest prompts and responses"
