"""What a session records, refuses and finishes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from easyrl.config import SamplingConfig
from easyrl.episodes.session import Session, TurnRefused
from easyrl.inference_client.errors import Outage, PromptRejected, PromptTooLong
from easyrl.schema import Prompt
from tests.easyrl.episodes.parts import IDS, Endpoint

PROMPT = Prompt(3, IDS, "q", None)


def session(endpoint: Any, sampling: SamplingConfig | None = None, **settings: Any) -> Session:
    return Session(PROMPT, sampling or SamplingConfig(max_tokens=8), 77, endpoint, **settings)


async def test_a_turn_is_recorded_before_it_is_answered():
    endpoint = Endpoint()
    of = session(endpoint)
    seen: list[int] = []
    task = asyncio.ensure_future(of.turn(IDS))
    task.add_done_callback(lambda _: seen.append(len(of.records)))
    made = await task
    await asyncio.sleep(0)
    assert seen == [1] and of.records[0] is made
    assert of.records[0].new_ids.tolist() == IDS.tolist()


async def test_a_client_that_is_gone_leaves_a_whole_record():
    endpoint = Endpoint(gated=True)
    of = session(endpoint)
    task = asyncio.ensure_future(of.turn(IDS))
    await endpoint.asked()
    task.cancel()
    await asyncio.sleep(0)
    assert of.idle_s == 0.0  # it is still sampled
    closing = asyncio.ensure_future(of.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    endpoint.gate.set()
    await closing
    assert len(of.records) == 1 and task.cancelled()


async def test_seeds_depend_on_what_is_asked_and_how_often_not_on_order():
    one, two = Endpoint(), Endpoint()
    longer = np.append(IDS, np.int32(9))
    first, second = session(one), session(two)
    for prompt in (IDS, longer, IDS):
        await first.turn(prompt)
    for prompt in (longer, IDS, IDS):
        await second.turn(prompt)
    assert len(set(one.seeds)) == 3
    assert one.seeds == [two.seeds[1], two.seeds[0], two.seeds[2]]
    other = Session(PROMPT, SamplingConfig(max_tokens=8), 78, three := Endpoint())
    await other.turn(IDS)
    assert three.seeds[0] not in one.seeds


async def test_a_turn_may_be_shorter_and_stop_elsewhere_and_nothing_else():
    endpoint = Endpoint()
    own = SamplingConfig(max_tokens=8, min_tokens=4, stop=["a"], stop_token_ids=[1])
    of = session(endpoint, own)
    await of.turn(IDS)
    assert endpoint.sampling[0] is own
    await of.turn(IDS, max_tokens=3, stop=("b", "a"), stop_token_ids=(2,))
    changed = endpoint.sampling[1]
    assert (changed.max_tokens, changed.min_tokens) == (3, 3)
    assert (changed.stop, changed.stop_token_ids) == (["a", "b"], [1, 2])
    await of.turn(IDS, max_tokens=99)
    assert endpoint.sampling[2].max_tokens == 8


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"prompt_ids": IDS[:0]}, 400, "no tokens"),
        ({"max_tokens": 0}, 400, "at least 1"),
        ({"stop": ("x",)}, 400, "stop_token_ids"),
    ],
)
async def test_what_is_refused_is_not_asked(asked: dict[str, Any], status: int, said: str):
    endpoint = Endpoint()
    of = session(endpoint, applies_stop_strings=False)
    with pytest.raises(TurnRefused, match=said) as refused:
        await of.turn(**{"prompt_ids": IDS, **asked})
    assert refused.value.status == status and not endpoint.seeds and not of.records


async def test_turns_are_bounded_and_none_comes_behind_the_end():
    of = session(Endpoint(), max_turns=2)
    await of.turn(IDS)
    await of.turn(IDS)
    with pytest.raises(TurnRefused, match="^max_turns_exceeded: .* at most 2 turns") as refused:
        await of.turn(IDS)
    assert (refused.value.status, refused.value.code) == (400, "max_turns_exceeded")
    await of.close()
    with pytest.raises(TurnRefused, match="has ended") as refused:
        await of.turn(IDS)
    assert refused.value.status == 410 and len(of.records) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptTooLong("http://a", "no room"), "context_length_exceeded"),
        (PromptRejected("http://a", "odd"), None),
    ],
)
async def test_a_refused_prompt_is_the_agents_and_the_episode_goes_on(error, code):
    endpoint = Endpoint(errors=[error])
    of = session(endpoint)
    with pytest.raises(TurnRefused, match=f"^{error.reason}") as refused:
        await of.turn(IDS)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert not of.failed.done() and not of.records
    await of.turn(IDS)
    assert len(of.records) == 1


async def test_an_outage_is_the_runs():
    of = session(Endpoint(errors=[Outage("nobody is there")]))
    with pytest.raises(TurnRefused) as refused:
        await of.turn(IDS)
    assert refused.value.status == 503
    with pytest.raises(Outage):
        of.failed.result()
