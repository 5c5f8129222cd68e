"""Where an episode's time goes: spans that add up to it, and sums of each environment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.host_process import ToolCallTime
from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.session import Session
from easyrl.episodes.times import between
from easyrl.metrics.names import declared
from easyrl.schema import Prompt
from tests.easyrl.episodes.parts import IDS, Endpoint, Environment, OpenGateway, Rollout, Said
from tests.easyrl.episodes.test_player import PROMPT, SAMPLING

ACTS_S, SAMPLES_S = 0.08, 0.05


class SlowEndpoint(Endpoint):
    async def __call__(self, *asked: Any) -> Any:
        await asyncio.sleep(SAMPLES_S)
        return await super().__call__(*asked)


async def acts_and_asks(session: Session, prompt: Prompt) -> Said:
    await asyncio.gather(session.turn(IDS), session.turn(IDS[:2]))  # side by side
    start_s = time.monotonic()
    await asyncio.sleep(ACTS_S)
    calls = (
        ToolCallTime("add", start_s, time.monotonic(), False),
        ToolCallTime("add", start_s - 100.0, start_s, True),  # of a host whose clock is another
    )
    await session.turn(IDS[:1])
    return Said(1.0, tool_calls=calls)


async def played(rollout: Rollout) -> tuple[list[Any], dict[str, float]]:
    """The spans, and the metrics."""
    gateway = OpenGateway()
    spans: list[Any] = []
    player = EpisodePlayer(
        gateway,
        [Environment(gateway, rollout)],
        lambda prompt: 0,
        span=lambda *told, **args: spans.append((*told, args)),
    )
    await player.play(PROMPT, 1, SAMPLING, 77, SlowEndpoint())
    metrics = player.times.taken()
    assert player.times.taken() == {}
    return spans, metrics


async def test_spans_and_metrics_of_an_episode() -> None:
    spans, metrics = await played(acts_and_asks)
    assert {environment for environment, *_ in spans} == {"game"}
    ((start_s, end_s, args),) = [of for _, name, *of in spans if name == "episode"]
    assert args == {"epoch": 0, "index": 3, "sample": 1, "turns": 3}
    acting = [(start, end) for _, name, start, end, _ in spans if name == "environment"]
    assert all(start_s <= start < end <= end_s for start, end in acting)
    acted_s = sum(end - start for start, end in acting)
    # two turns side by side, the environment, one turn: what is no acting was sampled
    assert acted_s >= ACTS_S
    assert end_s - start_s - acted_s == pytest.approx(2 * SAMPLES_S, abs=0.04)
    tools = [of for _, name, *of in spans if name == "tool add"]
    assert [args["ended"] for _, _, args in tools] == ["answered", "error"]
    assert all(start_s <= start <= end <= end_s for start, end, _ in tools)
    assert metrics["environment/game/environment_s"] == pytest.approx(acted_s)
    assert metrics["environment/game/episode_s"] == pytest.approx(end_s - start_s)
    counted = {name.rpartition("/")[2]: value for name, value in metrics.items()}
    assert (counted["episodes"], counted["failures"]) == (1.0, 0.0)
    assert (counted["turns"], counted["tokens"]) == (3.0, 12.0)
    assert (counted["tool_calls"], counted["tool_failures"]) == (2.0, 1.0)
    assert all(declared(name) is not None for name in metrics)


async def test_a_failed_episode_counts() -> None:
    async def fails(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        raise EnvironmentFailed("game", "KeyError: 'x'")

    spans, metrics = await played(fails)
    assert [name for _, name, *_ in spans][:1] == ["episode"]
    assert metrics["environment/game/failures"] == 1.0
    assert "environment/game/tool_s" not in metrics


def test_what_lies_between() -> None:
    assert list(between((0.0, 10.0), [(1.0, 2.0), (2.0, 3.0), (6.0, 12.0)])) == [
        *((0.0, 1.0), (3.0, 6.0))
    ]
    assert list(between((0.0, 1.0), [])) == [(0.0, 1.0)]
