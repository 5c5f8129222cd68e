"""The files of a checkpoint's weights: whether they are there and whole, by their headers."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from easyrl.config import ConfigError

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
REMEDY = "fetch the model again (hf download NAME --local-dir DIR), with all of its files"


def check_weight_files(folder: Path) -> None:
    """Raises ``ConfigError`` naming ``model.path`` and the file; reads headers only."""
    for file in weight_files(folder):
        if not file.is_file():
            raise ConfigError(f"model.path: {file} is missing; {REMEDY}")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            is_pointer = file.stat().st_size < 1024 and b"git-lfs" in file.read_bytes()
            what = "is a pointer of git-lfs" if is_pointer else f"is damaged ({error})"
            raise ConfigError(f"model.path: {file} {what}; {REMEDY}") from None


def weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if any(folder.glob(f"{PICKLED}*")):
            return []  # the older format, which tells when it is loaded
        raise ConfigError(f"model.path: {folder} has no {SINGLE} and no {INDEX}; {REMEDY}")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.path: {index} is damaged ({error}); {REMEDY}") from None
    return [folder / name for name in sorted(names)]
