"""Values that contradict each other, and what the configuration says about this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from easyrl.config.sections import (
        Config,
        DatasetConfig,
        ModelConfig,
        RolloutConfig,
        TrainerConfig,
    )


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message names each key and the remedy."""


# Sampling with any other value draws from another distribution than the policy's.
_ON_POLICY_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,  # the end is masked for so many tokens
}


def contradictions(config: Config) -> list[str]:
    """Values that do not go together, each with its key and the remedy."""
    problems = [
        *_rollout_contradictions(config.rollout),
        *_trainer_contradictions(config.trainer),
        *_model_contradictions(config.model),
    ]
    if config.model.dtype == "bf16" and config.trainer.zero_stage == 0:
        problems.append(
            "trainer.zero_stage: 0 cannot accumulate bf16 gradients in fp32 (DeepSpeed refuses "
            "it); use 1, 2 or 3, or model.dtype=fp32"
        )
    if config.trainer.offload_reference and config.model.lora is not None:
        problems.append(
            "trainer.offload_reference: has no effect with model.lora, whose reference is the "
            "policy without its adapter; remove it"
        )
    if not config.trainer.look_ahead and (reason := no_look_ahead(config)) is not None:
        problems.append(f"trainer.look_ahead: {reason}; remove it")
    labels = [reward.label for reward in config.rewards]
    if len(set(labels)) != len(labels):
        problems.append(f"rewards: two are called the same ({labels}); rename a function")
    return problems


def no_look_ahead(config: Config) -> str | None:
    """Why ``trainer.look_ahead`` has no effect; None where it has, as far as values tell.

    It also has none where the recipe needs no model beside the policy.
    """
    if config.run.mode == "sync":
        return "has no effect with run.mode=sync, where training begins with complete groups"
    if config.run.determinism == "strict":
        # which responses are computed ahead is a matter of the clock, and decides the last bits
        return "has no effect with run.determinism=strict, where nothing is computed ahead"
    if config.trainer.offload_reference:  # every piece of work would move the whole reference
        return "has no effect with trainer.offload_reference"
    return None


# A value set to its default is never refused: a dumped tree names every key and must load again.


def _is_set(section: BaseModel, key: str) -> bool:
    """Whether ``key`` has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _rollout_contradictions(rollout: RolloutConfig) -> list[str]:
    problems = []
    if rollout.num_generations < 2:
        problems.append("rollout.num_generations: a baseline needs at least 2 responses per group")
    if not rollout.allow_off_policy_sampling:
        problems += [
            f"rollout.{key}: {getattr(rollout, key)} samples from another distribution than the "
            f"policy that is trained, its ratios are biased; use {neutral}, or set "
            "rollout.allow_off_policy_sampling=true"
            for key, neutral in _ON_POLICY_SAMPLING.items()
            if getattr(rollout, key) != neutral
        ]
    return problems


def _model_contradictions(model: ModelConfig) -> list[str]:
    problems = []
    if _is_set(model, "checkpoint_every") and (model.activation_checkpointing == "none"):
        problems.append(
            "model.checkpoint_every: has no effect without checkpointing; remove it, or set "
            "model.activation_checkpointing to layer or selective"
        )
    return problems


def _trainer_contradictions(trainer: TrainerConfig) -> list[str]:
    problems = []
    if trainer.zero_stage == 0 and trainer.offload_optimizer:
        problems.append("trainer.offload_optimizer: needs trainer.zero_stage of 1, 2 or 3")
    if trainer.batch_size % trainer.updates_per_batch:
        problems.append(
            f"trainer.updates_per_batch: {trainer.updates_per_batch} slices of "
            f"trainer.batch_size={trainer.batch_size} prompts would not be equal; use a divisor"
        )
    if trainer.old_policy == "lagged" and trainer.updates_per_batch > 1:
        problems.append(
            "trainer.old_policy: lagged is defined for trainer.updates_per_batch=1 (the weights "
            "before the previous update); use auto, the batch's own policy"
        )
    if trainer.max_steps and trainer.max_steps % trainer.updates_per_batch:
        problems.append(
            f"trainer.max_steps: {trainer.max_steps} ends inside a batch of "
            f"trainer.updates_per_batch={trainer.updates_per_batch} steps; use a multiple"
        )
    if trainer.max_steps and trainer.warmup_steps >= trainer.max_steps:
        problems.append("trainer.warmup_steps: must be below trainer.max_steps")
    if trainer.lr_schedule == "constant" and trainer.min_lr_ratio > 0:
        problems.append(
            "trainer.min_lr_ratio: has no effect with a constant lr_schedule; remove it"
        )
    return problems


# ---- this machine ----


def check_paths(config: Config) -> None:
    """Checks what the configuration says about the machine: files, environment, packages.

    Raises ``ConfigError`` naming each key.

    Called before anything is loaded, on the machine of the trainer.
    """
    problems = [
        *_machine_problems(config),
        *_model_problems(config.model),
        *_dataset_problems("data", config.data),
    ]
    if config.evaluation is not None:
        problems += _dataset_problems("evaluation.data", config.evaluation.data)
    problems += _output_problems(config.run.output_dir)
    directory = config.weight_sync.directory
    if not directory.is_dir():
        problems.append(
            f"weight_sync.directory: {directory} does not exist; name a directory that trainer and "
            "endpoints both see"
        )
    elif not os.access(directory, os.W_OK):
        problems.append(f"weight_sync.directory: {directory} is not writable")
    if problems:
        raise ConfigError("\n".join(["this machine:", *(f"  {problem}" for problem in problems)]))


def _machine_problems(config: Config) -> list[str]:
    problems = []
    variable = config.inference.api_key_env
    if variable is not None and variable not in os.environ:
        problems.append(
            f"inference.api_key_env: the environment variable {variable} is not set; export it, or "
            "remove the key"
        )
    if "wandb" in config.run.trackers:
        found = importlib.util.find_spec("wandb")
        if found is None or found.origin is None:  # the latter is a folder of wandb's runs
            problems.append("run.trackers: wandb is not installed; pip install 'easyrl[wandb]'")
    return problems


def _model_problems(model: ModelConfig) -> list[str]:
    if not model.path.is_dir():
        return [
            f"model.path: {model.path} is not a directory; models are read from disk, download it "
            "first (hf download NAME --local-dir DIR)"
        ]
    problems = []
    if not (model.path / "config.json").is_file():
        problems.append(f"model.path: {model.path} has no config.json; is it a Hugging Face model?")
    if not model.tokenizer_path.is_dir():
        problems.append(f"model.tokenizer: {model.tokenizer_path} is not a directory")
    return problems


def _dataset_problems(key: str, data: DatasetConfig) -> list[str]:
    problems = [
        f"{key}.files[{i}]: {file} does not exist"
        for i, file in enumerate(data.files)
        if not file.is_file()
    ]
    if data.chat_template is not None and not data.chat_template.is_file():
        problems.append(f"{key}.chat_template: {data.chat_template} does not exist")
    return problems


def _output_problems(output_dir: Path) -> list[str]:
    existing = output_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [f"run.output_dir: {output_dir} cannot be made, {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run.output_dir: {output_dir} cannot be written, no permission in {existing}"]
    return []
