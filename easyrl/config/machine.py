"""What the configuration says about this machine: files, environment variables, packages."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from easyrl.config import Config, ConfigError, DatasetConfig, ModelConfig


def check_paths(config: Config) -> None:
    """Before anything is loaded, on the machine of the trainer. Raises ``ConfigError`` naming each
    key."""
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
