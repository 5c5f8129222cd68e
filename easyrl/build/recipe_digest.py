"""Hash of a run's recipe, by which ``easyrl verify`` knows that it checks with the same one."""

from __future__ import annotations

import json

from blake3 import blake3

from easyrl.config import Config
from easyrl.config.secrets import redact


def recipe_digest(config: Config) -> str:
    """Of the recipe's name, keys and own file: what its decisions depend on. 32 hex digits."""
    section = config.recipe
    # without secrets: verify has only what the run has written
    text = json.dumps(redact(section.model_dump(mode="json", exclude={"file"})), sort_keys=True)
    own = b"" if section.file is None else section.file.read_bytes()
    return blake3(text.encode() + b"\n" + own).hexdigest(length=16)
