"""Digest of the sampling and reward settings that a journalled group depends on."""

from __future__ import annotations

from blake3 import blake3

from easyrl.config import Config


def group_settings(config: Config, *, rejects: bool) -> str:
    """Digest of sampling, seed and rewards, 32 hex digits; with the contents of reward files.

    A run that is resumed with others generates the open batch's groups again. What only decides
    what happens after a failure is not in it, nor a recipe that ``rejects`` no group.
    """
    digest = blake3()
    parts = [
        config.rollout.model_dump_json(exclude={"queue_size"}),
        str(config.run.seed),
        str(config.scoring.truncated_reward),
        *(reward.model_dump_json() for reward in config.rewards),
    ]
    for part in parts:
        digest.update(part.encode() + b"\n")
    if rejects:
        digest.update(config.recipe.model_dump_json().encode() + b"\n")
        if config.recipe.file is not None:
            digest.update(config.recipe.file.read_bytes())
    for reward in config.rewards:
        if reward.file is not None:
            digest.update(reward.file.read_bytes())
    return digest.hexdigest(length=16)
