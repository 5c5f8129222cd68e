"""Where an episode's time goes: spans that add up to it, and sums of each environment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from easyrl.environments.failures import EnvironmentFailed
from easyrl.environments.host_process import ToolCallTime
from easyrl.episodes.player import EpisodePlayer
from easyrl.episodes.session import Session
from easyrl.episodes.times import EnvironmentTotals, between, environment_metrics
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
    metrics = environment_metrics([player.times.taken()])
    assert player.times.taken() == player.held_out_times.taken() == {}
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
    assert counted["branches"] == 3.0  # each asks with other ids, none continues another
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


async def test_episodes_of_held_out_prompts_are_counted_by_themselves() -> None:
    async def continues(session: Session, prompt: Prompt) -> Said:
        first = await session.turn(IDS)
        await session.turn(np.concatenate([IDS, first.token_ids]))
        await session.turn(IDS[:2])
        return Said(1.0)

    gateway = OpenGateway()
    player = EpisodePlayer(gateway, [Environment(gateway, continues)], lambda prompt: 0)
    held_out = replace(PROMPT, is_held_out=True)
    for prompt in (PROMPT, held_out, held_out):
        await player.play(prompt, 0, SAMPLING, 77, Endpoint())
    trained = environment_metrics([player.times.taken()])
    evaluated = environment_metrics([player.held_out_times.taken()], "held_out/")
    assert trained["environment/game/episodes"] == 1.0
    assert evaluated["environment/game/held_out/episodes"] == 2.0
    assert evaluated["environment/game/held_out/turns"] == 3.0
    assert evaluated["environment/game/held_out/branches"] == 2.0
    assert all(declared(name) is not None for name in evaluated)


def test_metrics_are_of_all_ranks() -> None:
    one = EnvironmentTotals(num_episodes=1, num_turns=2, num_tool_calls=1, tool_s=0.5)
    three = EnvironmentTotals(num_episodes=3, num_turns=2, num_branches=4, num_failures=1)
    told = environment_metrics([{"game": asdict(one)}, {"game": asdict(three), "other": {}}, {}])
    assert told["environment/game/episodes"] == 4.0 and told["environment/other/episodes"] == 0.0
    assert told["environment/game/turns"] == told["environment/game/branches"] == 1.0
    assert told["environment/game/failures"] == 1.0 and told["environment/game/tool_s"] == 0.5


def test_what_lies_between() -> None:
    assert list(between((0.0, 10.0), [(1.0, 2.0), (2.0, 3.0), (6.0, 12.0)])) == [
        *((0.0, 1.0), (3.0, 6.0))
    ]
    assert list(between((0.0, 1.0), [])) == [(0.0, 1.0)]


async def test_hung_threads_are_told_without_episodes_too_and_of_all_ranks() -> None:
    gateway = OpenGateway()
    hung = Environment(gateway, acts_and_asks, num_hung_threads=3)
    player = EpisodePlayer(gateway, [hung], lambda prompt: 0)
    metrics = environment_metrics([player.taken(), player.taken(), {}])
    assert metrics["environment/game/hung_threads"] == 6.0
    assert metrics["environment/game/episodes"] == 0.0
    hung.num_hung_threads = 0
    assert player.taken() == {}
