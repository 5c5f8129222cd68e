"""What the configuration says about this machine: files, environment variables, packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from easyrl.config import Config, ConfigError, DatasetConfig, set_key
from easyrl.config.run import TrackerName

# what the trackers import that extras bring
TRACKER_PACKAGES: dict[TrackerName, str] = {
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "prometheus": "prometheus_client",
}


def check_paths(config: Config, *, written_later: Collection[Path] = ()) -> None:
    """Before anything is loaded, on the machine of the trainer. Raises ``ConfigError`` naming each
    key.

    ``written_later``: a model, data files and pickled rewards that the caller writes when the run's
    folder is its own.
    """
    if problems := list(_problems(config, written_later)):
        raise ConfigError("\n".join(["this machine:", *(f"  {problem}" for problem in problems)]))


def _problems(config: Config, written_later: Collection[Path]) -> Iterator[str]:
    model, inference = config.model, config.inference
    variables = {"inference.api_key_env": inference.api_key_env} | {
        f"inference.endpoints[{i}].api_key_env": endpoint.api_key_env
        for i, endpoint in enumerate(inference.endpoints)
    }
    for key, variable in variables.items():
        if variable is not None and not os.environ.get(variable):
            yield (
                f"{key}: the environment variable {variable} is not set; export it, or remove the "
                "key"
            )
    for tracker in config.run.trackers:
        if tracker in TRACKER_PACKAGES and not _is_installed(TRACKER_PACKAGES[tracker]):
            yield f"run.trackers: {tracker} is not installed; pip install 'easyrl[{tracker}]'"
    if config.trainer.optimizer == "adam8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield (
            "trainer.optimizer: adam8bit needs bitsandbytes, which is not installed; pip install "
            "'easyrl[adam8bit]', or use adamw"
        )
    if model.path not in written_later:
        if (model_is_wrong := model_problem(model.path)) is not None:
            yield f"model.path: {model_is_wrong}"
        if model.path.is_dir() and not model.tokenizer_path.is_dir():
            yield (
                f"model.tokenizer: {model.tokenizer_path} is not a directory; name one with a "
                "tokenizer, or remove the key"
            )
    yield from _dataset_problems("data", config.data, written_later)
    for name, held_out in {} if config.evaluation is None else config.evaluation.sets.items():
        yield from _dataset_problems(f"{set_key(name)}.data", held_out.data, written_later)
    for i, reward in enumerate(config.rewards):
        file = reward.file
        if file is not None and file not in written_later and not file.is_file():
            yield f"rewards[{i}].file: {file} does not exist; correct the path"
    if (problem := _output_problem(config.run.output_dir)) is not None:
        yield f"run.output_dir: {problem}"
    if config.source == "records":  # no endpoint is given weights
        return
    directory = config.weight_sync.directory
    if not directory.is_dir():
        yield (
            f"weight_sync.directory: {directory} does not exist; name a directory that trainer and "
            "endpoints both see"
        )
    elif not os.access(directory, os.W_OK):
        yield f"weight_sync.directory: {directory} is not writable; name another"


def _is_installed(package: str) -> bool:
    """A folder of that name, which some packages write their runs to, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def model_problem(path: Path) -> str | None:
    """Why ``path`` is no folder of a model, with the remedy."""
    if not path.is_dir():
        return (
            f"{path} is not a directory, nor a model's name on the Hugging Face Hub; correct it, "
            "or download the model first (hf download NAME --local-dir DIR)"
        )
    if not (path / "config.json").is_file():
        hint = _whole_model_hint(path)
        return f"{path} has no config.json; is it a Hugging Face model? {hint}"
    return None


def _dataset_problems(
    key: str, data: DatasetConfig, written_later: Collection[Path]
) -> Iterator[str]:
    for i, file in enumerate(data.files):
        if file in written_later or file.is_file():
            continue
        if file.is_dir():
            problem = "is a directory; list its files one by one"
        elif set("*?") & set(file.name):
            problem = "does not exist; list the files one by one, patterns are not expanded"
        else:
            problem = "does not exist; correct the path, or download the data first"
        yield f"{key}.files[{i}]: {file} {problem}"
    if data.chat_template is not None and not data.chat_template.is_file():
        yield f"{key}.chat_template: {data.chat_template} does not exist; correct the path"


def _output_problem(output: Path) -> str | None:
    """Why nothing can be written there."""
    elsewhere = "name another folder"
    existing = output.absolute()
    try:
        while not existing.exists():
            if existing.is_symlink():
                target = existing.readlink()
                return f"{output}: {existing} is a link to {target}, which is not there; remove it"
            existing = existing.parent
    except (OSError, RuntimeError) as error:  # too long a name, links in a circle
        reason = error.strerror if isinstance(error, OSError) else "it is a link to itself"
        return f"{output} cannot be made ({reason}); {elsewhere}"
    if not existing.is_dir():
        return f"{output} cannot be made, {existing} is a file; {elsewhere}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{output} cannot be written, no permission in {existing}; {elsewhere}"
    return None


def _whole_model_hint(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "(it is an adapter: merge it into its base model, then give that folder)"
    return "(give the folder with config.json, tokenizer and safetensors files)"
