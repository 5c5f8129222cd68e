"""The environment of the runs: most episodes behave, those that a record names do something else.

Loaded by path in a host process; everything is imported at the start, as some change the folder.
"""

from __future__ import annotations

import resource
from typing import Any

import benchmarks.parts.hostile.episodes.life
import benchmarks.parts.hostile.episodes.processes
import benchmarks.parts.hostile.episodes.requests
import benchmarks.parts.hostile.episodes.rewards
import benchmarks.parts.hostile.episodes.sockets
import benchmarks.parts.hostile.episodes.tools  # noqa: F401
from benchmarks.parts.hostile.episodes.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.episodes.scene import Scene
from benchmarks.parts.hostile.episodes.turns import behave
from easyrl.environments.client import Client

# for those that open many connections; a host has as many files as the trainer's process by default
_HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_HARD, _HARD))


async def rollout(client: Client, prompt: Any) -> Any:
    """Reward of an episode, or whatever its behaviour returns."""
    scene = Scene(client.base_url, client.api_key, prompt)
    chosen = BEHAVIOURS.get(prompt.metadata["behaviour"])
    if chosen is None or prompt.seed not in prompt.metadata["acting"]:
        return await behave(scene)
    if chosen.once and scene.has_happened:
        return await behave(scene)
    return await chosen.act(scene)
