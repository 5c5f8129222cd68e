"""Plays episodes: one environment's rollout per sample of a group, against a recording session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

from easyrl.config import HistoryMode, OnFailure, SamplingConfig
from easyrl.environments.failures import (
    EnvironmentFailed,
    EnvironmentUnreachable,
    HostDied,
    OutOfTurns,
)
from easyrl.episodes.outages import EnvironmentOutages
from easyrl.episodes.rooms import Members, Rank, RolloutRoom
from easyrl.episodes.session import Generate, LendPlace, Session, SessionLost, lend_none
from easyrl.episodes.times import EpisodeTimes, ToolCall, tell_spans
from easyrl.episodes.turns import (
    TurnRecord,
    episode_completion,
    failed_at_once,
    rewards_of_turns,
)
from easyrl.metrics.event_log import Record, ignore
from easyrl.schema import MAX_TURNS, Completion, JournalledTurn, Prompt, RewardError
from easyrl.timeline.spans import AddSpan, ignore_span

log = logging.getLogger(__name__)

OnTurn = Callable[[JournalledTurn], object]


def ignore_turn(turn: JournalledTurn) -> None:
    """An ``OnTurn`` that keeps nothing."""


MAX_STARTS = 3  # of an episode whose host dies
MAX_LOST = 2  # starts with which the gateway died, and may have died of it

NEWS_S = 0.3  # in which the end of the gateway is known here, once a client has seen it


class EpisodeFailed(RuntimeError):
    """There is no turn to be trained of an episode, or of any of a group, which is excluded."""


class Outcome(Protocol):
    """What an environment says of an episode."""

    @property
    def reward(self) -> float: ...
    @property
    def components(self) -> Mapping[str, float]: ...
    @property
    def turn_rewards(self) -> Sequence[float] | Mapping[str, float]: ...
    @property
    def tool_calls(self) -> Sequence[ToolCall]: ...


class Environment(Protocol):
    """One entry of ``environments``, in processes of its own."""

    @property
    def name(self) -> str: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def history(self) -> HistoryMode: ...
    @property
    def on_failure(self) -> OnFailure: ...
    @property
    def num_hung_threads(self) -> int: ...

    async def run(
        self,
        session_url: str,
        key: str,
        prompt: Prompt,
        seed: int,
        seconds_since_request: Callable[[], float],
        alone: bool = False,
    ) -> Outcome:
        """One rollout to its end, with the model at ``session_url``, which ends in /v1.

        ``alone``: no other rollout is in its process. Raises ``EnvironmentFailed``.
        """


class Gateway(Protocol):
    """Where environments find the model (``GatewayChild``)."""

    def serves(self, session: Session) -> AbstractAsyncContextManager[str]:
        """Inside, ``session`` is open at the URL. Raises ``SessionLost`` if the process ends."""


@dataclass(eq=False)
class EpisodePlayer:
    """Plays a rollout for each sample that is asked for. Belongs to the producer's loop."""

    gateway: Gateway
    environments: Sequence[Environment]
    choose: Callable[[Prompt], int]  # which of them plays a prompt: the same after a restart
    _: KW_ONLY
    applies_stop_strings: Callable[[], bool] = lambda: True  # all endpoints, now
    record: Record = ignore
    span: AddSpan = ignore_span  # told of each episode, by its environment's name
    # what cannot be reached before an episode's first turn
    outages: EnvironmentOutages = field(default_factory=EnvironmentOutages)
    # of each environment, how many are open at a time; default: as many as are asked for
    rooms: Sequence[RolloutRoom] = ()
    num_restarts: int = field(default=0, init=False)
    times: EpisodeTimes = field(default_factory=EpisodeTimes, init=False)  # those to be trained
    held_out_times: EpisodeTimes = field(default_factory=EpisodeTimes, init=False)

    def __post_init__(self) -> None:
        self.rooms = self.rooms or [RolloutRoom() for _ in self.environments]

    def taken(self) -> dict[str, dict[str, float]]:
        """``times.taken``, with the threads that hang now in the environments' hosts."""
        taken = self.times.taken()
        for each in self.environments:
            if hung := each.num_hung_threads:
                taken.setdefault(each.name, {})["num_hung_threads"] = float(hung)
        return taken

    def group(
        self, prompt: Prompt, num_members: int, rank: Rank
    ) -> AbstractAsyncContextManager[Members]:
        """The turn of a group: entered when one of its episodes at least may be played; inside,
        each is to be played in a ``Members.place``."""
        return self.rooms[self.choose(prompt)].group(num_members, rank)

    async def play(
        self,
        prompt: Prompt,
        number: int,
        sampling: SamplingConfig,
        seed: int,
        generate: Generate,
        on_turn: OnTurn = ignore_turn,
        on_wait: Callable[[], object] = lambda: None,
        lend_place: LendPlace = lend_none,
    ) -> Completion:
        """The episode of sample ``number``; one that failed has a ``failure`` and no reward.

        ``on_turn`` is told of each turn before its answer goes out, ``on_wait`` where the first one
        has to wait for the environment; ``lend_place`` gives leave to ask ahead of ``generate``.
        Raises what ``generate`` does; of a rollout that fails
        ``RewardError`` where its environment's ``on_failure`` is ``fail``, and ``EpisodeFailed``
        where it is ``zero`` and there is no turn to be trained with that; ``Outage`` where its
        environment could not be reached for too long.
        """
        environment = self.environments[self.choose(prompt)]
        why, waiting = "", self.outages.waiting()
        num_died = num_lost = 0  # of its hosts; of gateways
        while num_died < MAX_STARTS and num_lost < MAX_LOST:
            session = Session(
                prompt,
                sampling,
                seed,
                generate,
                applies_stop_strings=self.applies_stop_strings(),
                max_turns=environment.max_turns,
                history=environment.history,
                lend_place=lend_place,
            )
            session.on_turn = partial(self._tell, on_turn, session, number, environment.name)
            try:
                # at last alone: the others that it has died with may have been the reason
                alone = num_died == MAX_STARTS - 1
                made = await self._timed(environment, session, number, alone=alone)
                return _heeded(made, environment, prompt, number)
            except EnvironmentUnreachable as error:
                on_wait()
                if not await waiting.pause(error):
                    made = failed_at_once(environment.name, str(error))
                    return _heeded(made, environment, prompt, number)
            except (SessionLost, HostDied) as error:
                why = str(error)
                if isinstance(error, SessionLost):
                    num_lost += error.is_suspect
                else:
                    num_died += 1
                self.num_restarts += 1
                self.record(
                    "episode_restarted",
                    epoch=prompt.epoch,
                    index=prompt.index,
                    sample=number,
                    problem=why,
                )
                log.warning("%s; an episode of %s starts again", why, environment.name)
        times = MAX_LOST if num_lost == MAX_LOST else MAX_STARTS
        failure = f"environment {environment.name}: {times} times: {why}"
        made = failed_at_once(environment.name, failure)
        return _heeded(made, environment, prompt, number)

    async def _timed(
        self, environment: Environment, session: Session, number: int, *, alone: bool
    ) -> Completion:
        """An episode, told to the timeline however it ends."""
        start_s, name = time.monotonic(), environment.name
        calls: list[ToolCall] = []
        try:
            made = await self._episode(environment, session, calls, alone=alone)
        finally:
            whole = start_s, time.monotonic()
            tell_spans(self.span, name, session, number, whole, calls)
        times = self.held_out_times if session.prompt.is_held_out else self.times
        times.add(name, made, session, whole, calls)
        return made

    async def _episode(
        self, environment: Environment, session: Session, calls: list[ToolCall], *, alone: bool
    ) -> Completion:
        """``calls``: filled with those of its tools."""
        try:
            async with self.gateway.serves(session) as url:
                rollout = asyncio.ensure_future(
                    environment.run(
                        f"{url}/v1",
                        session.key,
                        session.prompt,
                        session.seed,
                        lambda: session.idle_s,
                        alone,
                    )
                )
                ends: list[asyncio.Future[Any]] = [rollout, session.failed]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    if rollout.done() and rollout.exception() is not None:
                        # its client may have heard of the gateway's end before anybody here
                        await asyncio.wait([session.failed], timeout=NEWS_S)
                    if session.failed.done():
                        session.failed.result()  # raises what the run ends with
                finally:
                    if not rollout.done():
                        rollout.cancel()
                        with suppress(asyncio.CancelledError, Exception):
                            await rollout
        finally:
            await session.close()
        if session.failed.done():  # while the last turns were sampled
            session.failed.result()
        if rollout.exception() is None:
            calls += rollout.result().tool_calls
        return self._completion(environment, session, rollout)

    def _completion(
        self,
        environment: Environment,
        session: Session,
        rollout: asyncio.Future[Outcome],
    ) -> Completion:
        records = session.records
        ended_by = MAX_TURNS if session.is_out_of_turns else None
        try:
            outcome = rollout.result()
        except HostDied:
            raise
        except EnvironmentFailed as error:
            if not records and isinstance(error, EnvironmentUnreachable):
                raise  # it is nothing of the prompt's
            if not records:
                return failed_at_once(environment.name, str(error))
            if ended_by is not None and isinstance(error, OutOfTurns):
                return episode_completion(records, environment.name, 0.0, finish_reason=ended_by)
            return episode_completion(records, environment.name, 0.0, failure=str(error))
        if not records:
            failure = f"environment {environment.name}: it asked the model for nothing"
            return failed_at_once(environment.name, failure)
        try:
            given = rewards_of_turns(records, outcome.turn_rewards)
        except ValueError as error:
            failure = f"environment {environment.name}: {error}"
            return episode_completion(records, environment.name, 0.0, failure=failure)
        return episode_completion(
            records,
            environment.name,
            float(outcome.reward),
            components=dict(outcome.components),
            turn_rewards=given,
            finish_reason=ended_by,
        )

    def _tell(
        self,
        on_turn: OnTurn,
        session: Session,
        sample: int,
        environment: str,
        records: Sequence[TurnRecord],
    ) -> None:
        """Tells of the newest of ``records``."""
        self.outages.reached(environment)
        turn = records[-1]
        on_turn(
            JournalledTurn(
                session.prompt.key,
                sample,
                session.id,
                environment,
                turn.parent,
                turn.new_ids,
                turn.completion,
            )
        )


def _heeded(made: Completion, environment: Environment, prompt: Prompt, sample: int) -> Completion:
    """``made``, unless it failed and its environment's ``on_failure`` has that raise."""
    assert made.episode is not None
    failure, mode = made.episode.failure, environment.on_failure
    if failure is None or mode == "mask":
        return made
    if mode == "fail":
        at = f" ({prompt.location})" if prompt.location else ""
        raise RewardError(
            f"a rollout failed on prompt {prompt.index} of epoch {prompt.epoch}{at}, sample "
            f"{sample}: {failure}; correct it (environments[].on_failure=mask leaves such samples "
            "out, =zero gives them reward 0)"
        )
    if not made.episode.turns:
        raise EpisodeFailed(failure)
    return made
