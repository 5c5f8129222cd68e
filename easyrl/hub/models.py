"""Models by Hub id: ``namespace/name`` or ``namespace/name@revision``, in the place of a folder."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from easyrl.config import Config, ConfigError
from easyrl.runtime.run_files import CONFIG_FILE

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
# What a run reads of a model. Other formats of the same weights are not fetched.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_OTHERS = ["original/*", "consolidated*", "onnx/*"]

_ANSWER_S = 10.0  # that the Hub may take to say what it has

AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_local_models(config: AnyConfig, *, resume: bool = False) -> AnyConfig:
    """``config`` with folders of this machine in place of the Hub ids of models.

    They come from the Hub's local cache where they are whole in it, else from the Hub; with
    ``resume`` those that the run in ``run.output_dir`` has had, which the Hub may have others for.
    Raises ``ConfigError`` naming the key and the command that fetches the model.
    """
    model = config.model
    had = _paths_of_run(config.run.output_dir) if resume else {}

    def local(path: Path, key: str, *, has_weights: bool = True) -> Path:
        return local_model(path, key, had=had.get(key), has_weights=has_weights)

    own: dict[str, Path] = {"path": local(model.path, "model.path")}
    if model.tokenizer is not None:
        own["tokenizer"] = local(model.tokenizer, "model.tokenizer", has_weights=False)
    update: dict[str, Any] = {"model": model.model_copy(update=own)}
    if config.critic.path is not None:
        path = local(config.critic.path, "critic.path")
        update["critic"] = config.critic.model_copy(update={"path": path})
    teacher = config.recipe.settings.get("teacher")
    if isinstance(teacher, str) and teacher:
        folder = str(local(Path(teacher), "recipe.teacher"))
        update["recipe"] = config.recipe.model_copy(update={"teacher": folder})
    return config.model_copy(update=update)


def local_model(path: Path, key: str, *, had: Path | None = None, has_weights: bool = True) -> Path:
    """The folder ``path``, or that of the model which ``path`` is the Hub id of.

    What is neither comes back as it is: whoever checks the configuration's paths says more of it.
    ``had`` is taken where it is a snapshot of that id. Raises ``ConfigError`` naming ``key`` for an
    id of a model that is not to be had.
    """
    found = _ID.fullmatch(path.as_posix())
    if path.exists() or found is None:
        return path
    repo, revision = found["repo"], found["revision"]
    if had is not None and f"models--{repo.replace('/', '--')}" in had.parts and had.is_dir():
        return had
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    fetch = partial(
        snapshot_download,
        repo,
        revision=revision,
        allow_patterns=_FILES,
        ignore_patterns=_OTHERS,
        etag_timeout=_ANSWER_S,
    )
    with suppress(LocalEntryNotFoundError):
        cached = Path(fetch(local_files_only=True))
        if _is_whole(cached, has_weights):
            return cached
    try:
        fetched = Path(fetch())
        if _is_whole(fetched, has_weights):
            return fetched
        raise OSError("it has no safetensors, or the cache has a part of them and no network")
    except (HfHubHTTPError, OSError) as error:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{key}: {path} is not a directory here, and no model of this name comes from the "
            f"Hugging Face Hub ({_reason(error)}); correct the path, or fetch it where there is a "
            f"network (hf download {repo}{at} --local-dir models/{repo.rpartition('/')[2]}) and "
            "name that folder"
        ) from None


def _is_whole(snapshot: Path, has_weights: bool) -> bool:
    """Whether the cache has all that a run reads: others may have asked it for one file."""
    if not has_weights:
        return any(snapshot.glob("tokenizer*"))
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return any(snapshot.glob("*.safetensors"))
    shards = set(json.loads(index.read_text()).get("weight_map", {}).values())
    return all((snapshot / shard).is_file() for shard in shards)


def _paths_of_run(output: Path) -> dict[str, Path]:
    """By key, what the run in ``output`` was made of; nothing where there is no run."""
    file = output / CONFIG_FILE
    if not file.is_file():
        return {}
    tree = OmegaConf.load(file)
    keys = ("model.path", "model.tokenizer", "critic.path", "recipe.teacher")
    found = {key: OmegaConf.select(tree, key) for key in keys}
    return {key: Path(value) for key, value in found.items() if isinstance(value, str)}


def _reason(error: Exception) -> str:
    """Its first line; behind it stands advice that is ours to give."""
    lines = str(error).strip().splitlines()
    return f"{lines[0]:.150}" if lines else type(error).__name__
