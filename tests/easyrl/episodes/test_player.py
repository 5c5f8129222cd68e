"""Episodes of one sample: restarted where a process dies, failed where their own code does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from easyrl.completion_check import completion_problem
from easyrl.config import HistoryMode, OnFailure, SamplingConfig
from easyrl.environments.failures import (
    EnvironmentFailed,
    EnvironmentUnreachable,
    HostDied,
    OutOfTurns,
    RolloutHung,
)
from easyrl.episodes.outages import EnvironmentOutages
from easyrl.episodes.player import (
    MAX_LOST,
    MAX_STARTS,
    EpisodeFailed,
    EpisodePlayer,
)
from easyrl.episodes.scorer import EpisodeScorer
from easyrl.episodes.session import Session, SessionLost, TurnRefused
from easyrl.episodes.turns import failed_at_once
from easyrl.inference_client.errors import Outage
from easyrl.schema import Completion, Prompt, RewardError
from tests.easyrl.episodes.parts import IDS, Endpoint, Environment, OpenGateway, Rollout, Said

PROMPT = Prompt(3, IDS, "q", None)
SAMPLING = SamplingConfig(max_tokens=4)


async def two_turns(session: Session, prompt: Prompt) -> Said:
    first = await session.turn(IDS)
    path = np.concatenate([IDS, first.token_ids, IDS]).astype(np.int32)
    await session.turn(path)
    return Said(0.75, {"moves": 2.0})


def player(rollout: Rollout, *, on_failure: OnFailure = "mask", **settings: Any) -> EpisodePlayer:
    gateway = OpenGateway()
    environment = Environment(gateway, rollout, on_failure=on_failure)
    return EpisodePlayer(gateway, [environment], lambda prompt: 0, **settings)


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
        raise HostDied("game", "its host has ended: SIGSEGV")

    of = player(dies)
    made = await play(of, Endpoint())
    assert made.episode is not None and made.episode.turns == () and len(made.token_ids) == 0
    said = f"environment game: {MAX_STARTS} times: environment game: its host has ended: SIGSEGV"
    assert made.episode.failure == said


async def test_one_with_which_the_gateway_dies_twice_has_failed_and_others_go_on():
    """Those that were open and not worked on are played as often as it takes."""
    ends = {"killer": [True] * 9, "other": [False] * 5}
    starts = {name: 0 for name in ends}

    def dies(name: str) -> Rollout:
        async def rollout(session: Session, prompt: Prompt) -> Said:
            starts[name] += 1
            if ends[name]:
                raise SessionLost("the gateway's process ended", is_suspect=ends[name].pop())
            return await two_turns(session, prompt)

        return rollout

    killer = await play(player(dies("killer")), Endpoint())
    assert killer.episode is not None and starts["killer"] == MAX_LOST == 2
    assert killer.episode.failure == "environment game: 2 times: the gateway's process ended"
    other = await play(player(dies("other")), Endpoint())
    assert other.episode is not None and other.episode.failure is None and starts["other"] == 6


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
    assert completion_problem(made) is None
    score = await EpisodeScorer().score_sample(PROMPT, made)
    assert (score.reward, score.failed, score.masked) == (0.0, True, True)
    zero = EpisodeScorer(on_failure={"game": "zero"})
    score = await zero.score_sample(PROMPT, made)
    assert (score.reward, score.failed, score.masked) == (0.0, True, False)


@pytest.mark.parametrize("raises", [True, False])
async def test_without_a_turn_there_is_nothing_to_train(raises: bool):
    async def silent(session: Session, prompt: Prompt) -> Said:
        if raises:
            raise RolloutHung("game", "no request for 3 s")
        return Said(1.0)

    problem = "no request for 3 s" if raises else "for nothing"
    made = await play(player(silent), Endpoint())
    assert made.episode is not None and problem in str(made.episode.failure)
    assert completion_problem(made) is None and len(made.token_ids) == 0
    with pytest.raises(EpisodeFailed, match=problem):  # reward 0 has no token to be trained with
        await play(player(silent, on_failure="zero"), Endpoint())


@pytest.mark.parametrize("num_turns", [0, 1])
async def test_a_failure_ends_the_run_where_it_is_to(num_turns: int):
    async def fails(session: Session, prompt: Prompt) -> Said:
        for _ in range(num_turns):
            await session.turn(IDS)
        raise EnvironmentFailed("game", "KeyError: 'board'", "game.py:7")

    with pytest.raises(RewardError) as caught:
        await play(player(fails, on_failure="fail"), Endpoint())
    said = str(caught.value)
    assert "prompt 3 of epoch 0, sample 1: environment game: game.py:7: KeyError" in said
    assert "environments[].on_failure=mask" in said


async def test_a_group_without_any_turn_is_excluded():
    failed = failed_at_once("game", "KeyError")
    scorer = EpisodeScorer()
    scores = [await scorer.score_sample(PROMPT, failed) for _ in range(2)]
    with pytest.raises(EpisodeFailed, match="KeyError"):
        await scorer.score_group(PROMPT, [failed, failed], scores)
    made = await play(player(two_turns), Endpoint())
    scores = [scores[0], await scorer.score_sample(PROMPT, made)]
    masked, other = await scorer.score_group(PROMPT, [failed, made], scores)
    assert masked.masked and (other.reward, other.masked) == (0.75, False)


def unreachable() -> EnvironmentUnreachable:
    return EnvironmentUnreachable("game", "ConnectionRefusedError: [Errno 111]", "game.py:7")


async def test_what_cannot_be_reached_is_tried_again():
    events: list[str] = []
    missing = [unreachable(), unreachable()]

    async def flaky(session: Session, prompt: Prompt) -> Said:
        if missing:
            raise missing.pop()
        assert of.outages.any
        return await two_turns(session, prompt)

    record = lambda kind, **values: events.append(kind)  # noqa: E731
    outages = EnvironmentOutages(60.0, first_pause_s=0.01, record=record)
    of = player(flaky, outages=outages)
    made = await play(of, Endpoint())
    assert made.episode is not None and made.episode.failure is None
    assert events == ["environment_unreachable", "environment_reached"] and not outages.any


async def test_an_environment_that_stays_away_is_an_outage():
    async def away(session: Session, prompt: Prompt) -> Said:
        raise unreachable()

    of = player(away, on_failure="fail", outages=EnvironmentOutages(0.2, first_pause_s=0.01))
    with pytest.raises(Outage, match=r"game.py:7: ConnectionRefused.*\nfor 0.. s \(inference"):
        await asyncio.wait_for(play(of, Endpoint()), 10)


async def test_a_rollout_that_alone_cannot_connect_has_failed():
    async def away(session: Session, prompt: Prompt) -> Said:
        of.outages.reached("game")  # by others
        raise unreachable()

    of = player(away, outages=EnvironmentOutages(0.1, first_pause_s=0.01))
    made = await asyncio.wait_for(play(of, Endpoint()), 10)
    assert made.episode is not None and "ConnectionRefused" in str(made.episode.failure)


async def test_a_connection_that_is_lost_behind_a_turn_is_a_failure():
    async def loses(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        raise unreachable()

    made = await asyncio.wait_for(play(player(loses), Endpoint()), 10)
    assert made.episode is not None and made.episode.failure is not None
    assert len(made.episode.turns) == 1


def failing_scorer(**settings: Any) -> EpisodeScorer:
    return EpisodeScorer(groups_per_batch=3, num_generations=2, **settings)


@pytest.mark.parametrize("mode", ["mask", "zero"])
async def test_a_batch_of_failures_alone_ends_the_run(mode: OnFailure):
    failed, made = failed_at_once("game", "KeyError"), await play(player(two_turns), Endpoint())
    scorer = failing_scorer(on_failure={"game": mode})
    for completion in [*[failed] * 5, made, *[failed] * 5]:
        await scorer.score_sample(PROMPT, completion)
    with pytest.raises(RewardError) as caught:
        await scorer.score_sample(PROMPT, failed)
    said = str(caught.value)
    assert said.startswith("environments: all 6 rollouts of game in a row failed")
    assert f"on_failure={mode}" in said and "KeyError; correct it" in said


async def test_an_environment_whose_rollouts_all_fail_over_a_batch_ends_the_run():
    failed, made = failed_at_once("maze", "KeyError"), await play(player(two_turns), Endpoint())
    scorer = failing_scorer()
    for completion in [made, failed, made, failed, made, failed]:
        await scorer.score_sample(PROMPT, completion)
    with pytest.raises(RewardError, match="all 4 rollouts of maze in a row failed"):
        await scorer.score_sample(PROMPT, failed)  # six of both since its first
    few = failing_scorer()
    for completion in [failed, *[made] * 40, failed, failed]:
        await few.score_sample(PROMPT, completion)
    with pytest.raises(RewardError, match="all 4 rollouts of maze"):  # two groups' at least
        await few.score_sample(PROMPT, failed)


async def test_a_failure_of_the_gateways_end_is_none_of_the_rollout():
    """The client has heard of it first."""
    lost: list[Session] = []

    async def disconnected(session: Session, prompt: Prompt) -> Said:
        if lost:
            return await two_turns(session, prompt)
        lost.append(session)
        later = SessionLost("the gateway's process ended")
        asyncio.get_running_loop().call_later(0.05, session.fail, later)
        raise EnvironmentFailed("game", "ServerDisconnectedError: Server disconnected")

    made = await play(player(disconnected), Endpoint())
    assert made.episode is not None and made.episode.failure is None


async def test_turn_rewards_have_to_be_as_many_as_turns():
    async def wrong(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        return Said(1.0, turn_rewards=(1.0, 2.0))

    made = await play(player(wrong), Endpoint())
    assert made.episode is not None
    assert made.episode.failure == "environment game: it gave 2 turn rewards for 1 turns"

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
    taken = of.times.taken()["game"]
    assert (taken["num_failures"], taken["num_truncated"]) == (0, 1)


async def test_a_limit_that_was_not_reached_is_no_excuse():
    """Nor for a host that says so: what the session has refused counts."""

    async def forges(session: Session, prompt: Prompt) -> Said:
        await session.turn(IDS)
        raise OutOfTurns("game", "400: at most 2 turns")

    made = await play(player(forges), Endpoint())
    assert made.episode is not None and made.episode.failure is not None
    assert made.finish_reason == "stop"
