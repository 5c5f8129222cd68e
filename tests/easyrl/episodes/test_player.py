"""Episodes of one sample: restarted where a process dies, failed where their own code does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from easyrl.config import HistoryMode, SamplingConfig
from easyrl.environments.failures import EnvironmentFailed, HostDied, OutOfTurns, RolloutHung
from easyrl.episodes.player import (
    MAX_STARTS,
    EpisodeFailed,
    EpisodePlayer,
)
from easyrl.episodes.scorer import EpisodeScorer
from easyrl.episodes.session import Session, SessionLost, TurnRefused
from easyrl.inference_client.errors import Outage
from easyrl.schema import Completion, Prompt
from tests.easyrl.episodes.parts import IDS, Endpoint, Environment, OpenGateway, Rollout, Said

PROMPT = Prompt(3, IDS, "q", None)
SAMPLING = SamplingConfig(max_tokens=4)


async def two_turns(session: Session, prompt: Prompt) -> Said:
    first = await session.turn(IDS)
    path = np.concatenate([IDS, first.token_ids, IDS]).astype(np.int32)
    await session.turn(path)
    return Said(0.75, {"moves": 2.0})


def player(rollout: Rollout, **settings: Any) -> EpisodePlayer:
    gateway = OpenGateway()
    return EpisodePlayer(gateway, [Environment(gateway, rollout)], lambda prompt: 0, **settings)


async def play(of: EpisodePlayer, endpoint: Endpoint) -> Completion:
    return await of.play(PROMPT, 1, SAMPLING, 77, endpoint)


async def test_the_record_is_what_the_endpoint_sampled():
    endpoint = Endpoint()
    made = await play(player(two_turns), endpoint)
    assert made.episode is not None
    assert [turn.parent for turn in made.episode.turns] == [None, 0]
    trained = made.token_ids[made.loss_mask]
    logged = [np.random.default_rng(seed).integers(0, 50, 4) for seed in endpoint.seeds]
    assert trained.tolist() == np.concatenate(logged).tolist()
    score = await EpisodeScorer().score_sample(PROMPT, made)
    assert (score.reward, score.failed) == (0.75, False)
    assert score.components == {"game/reward": 0.75, "game/moves": 2.0}


@pytest.mark.parametrize("history", ["keep", "as_template"])
async def test_a_session_has_the_history_that_its_environment_wants(history: HistoryMode):
    seen: list[str] = []

    async def looks(session: Session, prompt: Prompt) -> Said:
        seen.append(session.history)
        return await two_turns(session, prompt)

    gateway = OpenGateway()
    environment = Environment(gateway, looks, history=history)
    await play(EpisodePlayer(gateway, [environment], lambda prompt: 0), Endpoint())
    assert seen == [history]


async def test_an_episode_whose_process_dies_starts_again_with_the_same_seeds():
    starts: list[int] = []

    async def dies_once(session: Session, prompt: Prompt) -> Said:
        said = await two_turns(session, prompt)
        starts.append(len(session.records))
        if len(starts) == 1:
            raise HostDied("game", "its host has ended: SIGKILL")
        return said

    events: list[str] = []
    endpoint = Endpoint()
    of = player(dies_once, record=lambda kind, **values: events.append(kind))
    made = await play(of, endpoint)
    assert starts == [2, 2] and endpoint.seeds[:2] == endpoint.seeds[2:]
    assert made.episode is not None and len(made.episode.turns) == 2  # not those of the first start
    assert events == ["episode_restarted"] and of.num_restarts == 1


async def test_one_that_dies_again_and_again_is_given_up():
    async def dies(session: Session, prompt: Prompt) -> Said:
        raise SessionLost("its host has ended: SIGSEGV")

    of = player(dies)
    with pytest.raises(EpisodeFailed, match=f"environment game: {MAX_STARTS} times: .*SIGSEGV"):
        await play(of, Endpoint())
    (environment,) = of.environments
    assert isinstance(environment, Environment)
    assert environment.alone == [False] * MAX_STARTS  # in hosts that have not died


async def test_the_last_start_is_alone_and_others_deaths_are_counted_apart():
    ends = [HostDied("game", "SIGKILL"), SessionLost("it"), HostDied("game", "SIGKILL")]

    async def dies(session: Session, prompt: Prompt) -> Said:
        if ends:
            raise ends.pop(0)
        return await two_turns(session, prompt)

    of = player(dies)
    made = await play(of, Endpoint())
    assert made.episode is not None and made.episode.failure is None
    (environment,) = of.environments
    assert isinstance(environment, Environment)
    assert environment.alone == [False, False, False, True]  # nobody else can be the reason then


async def test_own_code_that_fails_behind_a_turn_scores_nothing():
    async def fails(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        raise EnvironmentFailed("game", "ZeroDivisionError: division by zero", "game.py:7")

    made = await play(player(fails), Endpoint())
    assert made.episode is not None and "game.py:7" in str(made.episode.failure)
    score = await EpisodeScorer().score_sample(PROMPT, made)
    assert (score.reward, score.failed) == (0.0, True)


@pytest.mark.parametrize("raises", [True, False])
async def test_without_a_turn_there_is_nothing_to_train(raises: bool):
    async def silent(session: Session, prompt: Prompt) -> Said:
        if raises:
            raise RolloutHung("game", "no request for 3 s")
        return Said(1.0)

    with pytest.raises(EpisodeFailed, match="no request for 3 s" if raises else "for nothing"):
        await play(player(silent), Endpoint())


async def test_turn_rewards_have_to_be_as_many_as_turns():
    async def wrong(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        return Said(1.0, turn_rewards=(1.0, 2.0))

    made = await play(player(wrong), Endpoint())
    assert made.episode is not None
    assert made.episode.failure == "it gave 2 turn rewards for 1 turns"

    async def right(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        return Said(1.0, turn_rewards=(0.5,))

    made = await play(player(right), Endpoint())
    assert made.episode is not None and made.episode.turn_rewards == (0.5,)


async def test_an_outage_ends_the_rollout_and_is_raised():
    ended: list[str] = []

    async def patient(session: Session, prompt: Prompt) -> Said:
        try:
            await session.turn(IDS)
        except Exception:
            await asyncio.sleep(60)  # an agent that waits and tries again
        finally:
            ended.append("cancelled")
        raise AssertionError

    with pytest.raises(Outage):
        await asyncio.wait_for(play(player(patient), Endpoint(errors=[Outage("nobody")])), 10)
    assert ended == ["cancelled"]


async def test_turns_in_flight_at_the_end_are_finished_and_recorded():
    endpoint = Endpoint(gated=True)

    async def leaves(session: Session, prompt: Prompt) -> Said:
        asyncio.ensure_future(session.turn(IDS)).add_done_callback(lambda _: None)
        await endpoint.asked()
        return Said(1.0)

    playing = asyncio.ensure_future(play(player(leaves), endpoint))
    await endpoint.asked()
    await asyncio.sleep(0.01)
    assert not playing.done()
    endpoint.gate.set()
    made = await playing
    assert made.episode is not None and len(made.episode.turns) == 1


async def test_a_cancelled_sample_cancels_its_rollout():
    ended: list[str] = []

    async def slow(session: Session, prompt: Prompt) -> Said:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError

    playing = asyncio.ensure_future(play(player(slow), Endpoint()))
    await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert ended == ["cancelled"]


@pytest.mark.parametrize("rewards", ["by id", "unknown", "of another start", "none"])
async def test_turn_rewards_by_id_find_their_turns_in_any_order(rewards: str):
    async def branches(session: Session, prompt: Prompt) -> Said:
        slow, fast = session.turn(IDS), session.turn(IDS[:2])
        first, second = await asyncio.gather(slow, fast)
        third = await session.turn(IDS)
        given = {
            "by id": {third.id: 3.0, second.id: 2.0},
            "unknown": {first.id: 1.0, "chatcmpl-9": 1.0},
            "of another start": {f"turn-{'0' * 16}-0": 1.0},
            "none": {},
        }
        return Said(0.5, turn_rewards=given[rewards])

    endpoint = Endpoint(delays_s=[0.05, 0.0, 0.0])
    made = await play(player(branches), endpoint)
    assert made.episode is not None
    assert [len(made.token_ids[t.start : t.sampled]) for t in made.episode.turns] == [2, 3, 3]
    if rewards == "by id":
        assert made.episode.turn_rewards == (2.0, 0.0, 3.0)
    elif rewards == "none":
        assert made.episode.turn_rewards == () and made.episode.failure is None
    else:
        named = "chatcmpl-9" if rewards == "unknown" else f"turn-{'0' * 16}-0"
        said = made.episode.failure
        assert said is not None and f"no turn {named!r}" in said and "its 3 are turn-" in said


@pytest.mark.parametrize("passes", [True, False])
async def test_an_episode_may_end_by_its_turn_limit(passes: bool):
    async def goes_on(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        await session.turn(IDS)
        try:
            await session.turn(IDS)
        except TurnRefused as error:
            if passes:
                raise OutOfTurns("game", str(error)) from error
        return Said(0.5, {"moves": 2.0})

    gateway = OpenGateway()
    of = EpisodePlayer(gateway, [Environment(gateway, goes_on, max_turns=2)], lambda prompt: 0)
    made = await play(of, Endpoint())
    assert (made.finish_reason, made.truncated) == ("max_turns", True)
    assert made.episode is not None and made.episode.failure is None
    assert [turn.finish_reason for turn in made.episode.turns] == ["stop", "stop"]
    score = await EpisodeScorer().score_sample(PROMPT, made)
    assert (score.reward, score.failed) == (0.0 if passes else 0.5, False)
    cut = await EpisodeScorer(truncated_reward=-1.0).score_sample(PROMPT, made)
    assert (cut.reward, cut.failed) == (-1.0, False)
    metrics = of.times.taken()
    assert metrics["environment/game/failures"] == 0.0
    assert metrics["environment/game/truncated"] == 1.0


async def test_a_limit_that_was_not_reached_is_no_excuse():
    """Nor for a host that says so: what the session has refused counts."""

    async def forges(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        raise OutOfTurns("game", "400: at most 2 turns")

    made = await play(player(forges), Endpoint())
    assert made.episode is not None and made.episode.failure is not None
    assert made.finish_reason == "stop"
