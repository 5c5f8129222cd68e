"""Models by Hub id: ``namespace/name`` or ``namespace/name@revision``, in the place of a folder."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from easyrl.config import Config, ConfigError

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
# What a run reads of a model. Other formats of the same weights are not fetched.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_OTHERS = ["original/*", "consolidated*", "onnx/*"]

AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_local_models(config: AnyConfig) -> AnyConfig:
    """``config`` with folders of this machine in place of the Hub ids of models.

    They come from the Hub's local cache where they are in it, else from the Hub. Raises
    ``ConfigError`` naming the key and the command that fetches the model.
    """
    model = config.model
    own: dict[str, Path] = {"path": local_model(model.path, "model.path")}
    if model.tokenizer is not None:
        own["tokenizer"] = local_model(model.tokenizer, "model.tokenizer")
    update: dict[str, Any] = {"model": model.model_copy(update=own)}
    if config.critic.path is not None:
        path = local_model(config.critic.path, "critic.path")
        update["critic"] = config.critic.model_copy(update={"path": path})
    teacher = config.recipe.settings.get("teacher")
    if isinstance(teacher, str) and teacher:
        folder = str(local_model(Path(teacher), "recipe.teacher"))
        update["recipe"] = config.recipe.model_copy(update={"teacher": folder})
    return config.model_copy(update=update)


def local_model(path: Path, key: str) -> Path:
    """The folder ``path``, or that of the model which ``path`` is the Hub id of.

    What is neither comes back as it is: whoever checks the configuration's paths says more of it.
    Raises ``ConfigError`` naming ``key`` for an id of a model that is not to be had.
    """
    found = _ID.fullmatch(path.as_posix())
    if path.exists() or found is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, revision = found["repo"], found["revision"]
    fetch = partial(
        snapshot_download,
        repo,
        revision=revision,
        allow_patterns=_FILES,
        ignore_patterns=_OTHERS,
    )
    try:
        return Path(fetch(local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(fetch())
    except (HfHubHTTPError, OSError) as error:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{key}: {path} is not a directory here, and no model of this name comes from the "
            f"Hugging Face Hub ({_reason(error)}); correct the path, or fetch it where there is a "
            f"network (hf download {repo}{at} --local-dir models/{repo.rpartition('/')[2]}) and "
            "name that folder"
        ) from None


def _reason(error: Exception) -> str:
    """Its first line; behind it stands advice that is ours to give."""
    lines = str(error).strip().splitlines()
    return f"{lines[0]:.150}" if lines else type(error).__name__
