"""A local cache of the Hugging Face Hub with a model in it, as ``huggingface_hub`` lays it out."""

from __future__ import annotations

import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_model(home: Path, repo: str, model: Path, commit: str = COMMIT) -> Path:
    """Puts the files of ``model`` into the cache of ``HF_HOME=home``; the snapshot's folder."""
    storage = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (storage / "refs").mkdir(exist_ok=True)
    (storage / "refs" / "main").write_text(commit)
    return snapshot
