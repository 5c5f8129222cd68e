"""Plays episodes: one environment's rollout per sample of a group, against a recording session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

from easyrl.config import HistoryMode, SamplingConfig
from easyrl.environments.failures import EnvironmentFailed, HostDied
from easyrl.episodes.session import Generate, Session, SessionLost
from easyrl.episodes.times import EpisodeTimes, ToolCall, tell_spans
from easyrl.episodes.turns import TurnRecord, continued, episode_completion
from easyrl.metrics.event_log import Record, ignore
from easyrl.schema import Completion, JournalledTurn, Prompt
from easyrl.timeline.spans import AddSpan, ignore_span

log = logging.getLogger(__name__)

OnTurn = Callable[[JournalledTurn], object]


def ignore_turn(turn: JournalledTurn) -> None:
    """An ``OnTurn`` that keeps nothing."""


MAX_STARTS = 3  # of an episode whose host dies; likewise of one whose gateway does


class EpisodeFailed(RuntimeError):
    """An episode has no turn that could be trained; its group is excluded."""


class Outcome(Protocol):
    """What an environment says of an episode."""

    @property
    def reward(self) -> float: ...
    @property
    def components(self) -> Mapping[str, float]: ...
    @property
    def turn_rewards(self) -> Sequence[float]: ...
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
    num_restarts: int = field(default=0, init=False)
    times: EpisodeTimes = field(default_factory=EpisodeTimes, init=False)  # those to be trained
    held_out_times: EpisodeTimes = field(default_factory=EpisodeTimes, init=False)

    async def play(
        self,
        prompt: Prompt,
        number: int,
        sampling: SamplingConfig,
        seed: int,
        generate: Generate,
        on_turn: OnTurn = ignore_turn,
    ) -> Completion:
        """The episode of sample ``number``. Raises what ``generate`` does, ``EpisodeFailed``.

        A rollout that fails behind its first turn is an episode with a ``failure`` and no reward.
        ``on_turn`` is told of each turn before its answer goes out.
        """
        environment = self.environments[self.choose(prompt)]
        why = ""
        num_ends = Counter[type[Exception]]()  # of processes that it needs, by what they are
        while max(num_ends.values(), default=0) < MAX_STARTS:
            session = Session(
                prompt,
                sampling,
                seed,
                generate,
                applies_stop_strings=self.applies_stop_strings(),
                max_turns=environment.max_turns,
                history=environment.history,
            )
            session.on_turn = partial(_tell, on_turn, session, number, environment.name)
            try:
                # at last alone: the others that it has died with may have been the reason
                alone = num_ends[HostDied] == MAX_STARTS - 1
                return await self._timed(environment, session, number, alone=alone)
            except (SessionLost, HostDied) as error:
                why = str(error)
                num_ends[type(error)] += 1
                self.num_restarts += 1
                self.record(
                    "episode_restarted",
                    epoch=prompt.epoch,
                    index=prompt.index,
                    sample=number,
                    problem=why,
                )
                log.warning("%s; an episode of %s starts again", why, environment.name)
        raise EpisodeFailed(f"environment {environment.name}: {MAX_STARTS} times: {why}")

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
        return self._completion(environment, session.records, rollout)

    def _completion(
        self,
        environment: Environment,
        records: Sequence[TurnRecord],
        rollout: asyncio.Future[Outcome],
    ) -> Completion:
        try:
            outcome = rollout.result()
        except HostDied:
            raise
        except EnvironmentFailed as error:
            if not records:
                raise EpisodeFailed(str(error)) from error
            return episode_completion(records, environment.name, 0.0, failure=str(error))
        if not records:
            raise EpisodeFailed(f"environment {environment.name}: it asked the model for nothing")
        given = tuple(float(reward) for reward in outcome.turn_rewards)
        if len(given) not in (0, len(records)):
            failure = f"it gave {len(given)} turn rewards for {len(records)} turns"
            return episode_completion(records, environment.name, 0.0, failure=failure)
        return episode_completion(
            records,
            environment.name,
            float(outcome.reward),
            components=dict(outcome.components),
            turn_rewards=given,
        )


def _tell(
    on_turn: OnTurn,
    session: Session,
    sample: int,
    environment: str,
    records: Sequence[TurnRecord],
) -> None:
    """Tells of the newest of ``records``."""
    *earlier, turn = records
    parent, known = continued(turn.prompt_ids, earlier)
    on_turn(
        JournalledTurn(
            session.prompt.key,
            sample,
            session.id,
            environment,
            parent,
            turn.prompt_ids[known:],
            turn.completion,
        )
    )
