"""Rewards that are none."""

from __future__ import annotations

from typing import Any

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import Scene
from benchmarks.parts.hostile.episodes.turns import behave


@behaviour("reward", "fails")
async def reward_is_not_a_number(scene: Scene) -> float:
    """NaN."""
    return await _after(scene, float("nan"))


@behaviour("reward", "fails")
async def reward_is_infinite(scene: Scene) -> float:
    """Minus infinity."""
    return await _after(scene, float("-inf"))


@behaviour("reward", "fails")
async def reward_is_beyond_float32(scene: Scene) -> float:
    """1e300: a finite number in Python alone."""
    return await _after(scene, 1e300)


@behaviour("reward", "fails")
async def reward_of_400_digits(scene: Scene) -> int:
    """10^400: a number in Python alone."""
    return await _after(scene, 10**400)


@behaviour("reward", "fails")
async def reward_is_a_text(scene: Scene) -> str:
    """A text."""
    return await _after(scene, "1.0")


@behaviour("reward", "fails")
async def reward_is_nothing(scene: Scene) -> None:
    """None."""
    return await _after(scene, None)


@behaviour("reward", "fails")
async def reward_raises(scene: Scene) -> Any:
    """An object whose number cannot be had."""

    class Evil:
        def __float__(self) -> float:
            raise OverflowError("no")

        def __repr__(self) -> str:
            raise ValueError("nor a text")

    return await _after(scene, {"reward": Evil()})


@behaviour("reward", "fails")
async def too_many_turn_rewards(scene: Scene) -> Any:
    """A reward for turns that there were not."""
    return await _after(scene, {"reward": 1.0, "turn_rewards": [1.0] * 99})


@behaviour("reward", "fails")
async def turn_rewards_beyond_float32(scene: Scene) -> Any:
    """Rewards of turns that are finite in Python alone."""
    return await _after(scene, {"reward": 1.0, "turn_rewards": [1e300, -1e300, 0.0, 0.0]})


@behaviour("reward", "fails")
async def components_are_a_list(scene: Scene) -> Any:
    """Components that are no mapping."""
    return await _after(scene, {"reward": 1.0, "components": [1, 2]})


@behaviour("reward", "fails")
async def a_million_components(scene: Scene) -> Any:
    """More metrics than anybody reads."""
    return await _after(scene, {"reward": 1.0, "components": dict.fromkeys(range(10**6), 1.0)})


@behaviour("reward")
async def odd_components(scene: Scene) -> Any:
    """Metrics whose names are empty, a path, lines, or half a surrogate pair."""
    names = ["", "../../etc/passwd", "a\nb", "\ud800", "é" * 300, "x/y"]
    return await _after(scene, {"reward": 1.0, "components": dict.fromkeys(names, 0.5)})


async def _after(scene: Scene, said: Any) -> Any:
    await behave(scene)
    scene.happened()
    return said
