"""Turns of an episode that behaves; a hostile one begins or ends with some of them."""

from __future__ import annotations

from typing import Any

from benchmarks.parts.hostile.episodes.scene import FIRST, MORE, Scene


async def first_turn(scene: Scene) -> list[int]:
    """All ids that the next turn may continue."""
    return [*FIRST, *await scene.tokens(FIRST)]


async def behave(scene: Scene) -> float:
    """Two turns by token ids, the second behind the first, and a chat of two; the reward."""
    ids = await first_turn(scene)
    await scene.tokens([*ids, *MORE])
    return await talk(scene, scene.prompt.text)


async def talk(scene: Scene, text: str) -> float:
    """A chat of two turns; the reward."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    messages.append(await scene.chat(messages))
    messages.append({"role": "user", "content": "12"})
    await scene.chat(messages)
    return scene.reward
