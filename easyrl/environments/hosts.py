"""Host processes of one environment, and rollouts in them: the trainer's side.

Nothing is left behind: a host, and all that it has started, ends with ``close`` and with the
trainer, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from easyrl.config import EnvironmentConfig, HistoryMode, OnFailure
from easyrl.environments.failures import EnvironmentFailed, HostDied, RolloutHung
from easyrl.environments.host_process import HostProcess, Outcome, Rollout
from easyrl.runtime.process_guard import ProcessGuard
from easyrl.runtime.workers.child_process import new_mark
from easyrl.schema import Prompt

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0  # for a rollout to end that was cancelled
MOST_HUNG_THREADS = 32  # of a host; then it is replaced
LONGEST_LOOK_S = 5.0  # between two looks at whether a rollout hangs


class EnvironmentHosts:
    """``num_hosts`` processes that run rollouts of one environment for one asyncio loop.

    A host that dies fails the rollouts in it, and the next rollout starts another.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        *,
        model: str = "policy",
        cancel_grace_s: float = CANCEL_GRACE_S,
    ) -> None:
        self.environment = environment
        self._model, self._cancel_grace_s = model, cancel_grace_s
        self._mark = new_mark()
        self._hosts = [HostProcess(environment, self._mark) for _ in range(environment.num_hosts)]
        self._retiring: set[HostProcess] = set()
        self._room = asyncio.Semaphore(environment.num_hosts)  # of rollouts that are alone
        self._numbers = itertools.count()
        self._said_rollouts: int | None = None
        self.num_replaced = 0  # hosts, for the threads that hung in them
        self._guard: ProcessGuard | None = None  # while it runs

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def max_rollouts(self) -> int | None:
        """That may be open at a time, of all ranks, by the configuration or by what hosts have
        found; None: nobody says."""
        if self.environment.max_rollouts is not None:
            return self.environment.max_rollouts
        said = [host.max_rollouts for host in self._hosts if host.max_rollouts is not None]
        self._said_rollouts = min(said, default=self._said_rollouts)  # a new one has yet to ask
        return self._said_rollouts

    @property
    def max_turns(self) -> int:
        return self.environment.max_turns

    @property
    def history(self) -> HistoryMode:
        return self.environment.history

    @property
    def on_failure(self) -> OnFailure:
        return self.environment.on_failure

    async def start(self) -> None:
        """Starts the hosts and returns when the environment is loaded in each.

        Calls belong to this loop, and its thread, from now on. Raises ``EnvironmentFailed``.
        """
        self._guard = ProcessGuard()
        self._guard.watch_marked(self._mark)
        limit_s = self.environment.start_timeout_s
        try:
            await asyncio.wait_for(asyncio.gather(*(h.ready() for h in self._hosts)), limit_s)
        except TimeoutError:
            raise EnvironmentFailed(
                self.environment.name,
                f"was not loaded within {limit_s:g} s; see what takes it so long, or raise "
                "start_timeout_s",
            ) from None

    async def close(self) -> None:
        """Kills the hosts; rollouts in them are cancelled. Safe to call twice."""
        guard, self._guard = self._guard, None
        hosts = [*self._hosts, *self._retiring]
        await asyncio.gather(*(host.close() for host in hosts))
        for host in hosts:
            for rollout in host.rollouts.values():
                rollout.future.cancel()
            host.rollouts.clear()
        if guard is not None:
            await asyncio.to_thread(guard.release)

    @property
    def num_hung_threads(self) -> int:
        """That hosts now have, of calls that did not end in their time."""
        return sum(host.num_hung_threads for host in (*self._hosts, *self._retiring))

    @property
    def num_rollouts(self) -> int:
        """That run now."""
        return sum(len(host.rollouts) for host in (*self._hosts, *self._retiring))

    async def run(
        self,
        session_url: str,
        key: str,
        prompt: Prompt,
        seed: int,
        seconds_since_request: Callable[[], float],
        alone: bool = False,
    ) -> Outcome:
        """One rollout, which asks its model at ``session_url`` (ends in /v1) with ``key``.

        ``seconds_since_request`` says since when the rollout has had no request: 0 while one is
        open, infinity before the first. ``alone``: in a host of its own, where no other rollout can
        be the reason if that dies; at most ``num_hosts`` are at once. Raises ``EnvironmentFailed``:
        ``RolloutHung``, ``HostDied``, or what its code raised. Cancelling cancels the rollout.
        """
        if self._guard is None:
            raise RuntimeError(f"the hosts of environment {self.environment.name} do not run")
        number = next(self._numbers)
        message = {
            "type": "start",
            "id": number,
            "base_url": session_url,
            "api_key": key,
            "model": self._model,
            "prompt": _record(prompt),
            "seed": seed,
        }
        data = orjson.dumps(message, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
        rollout = Rollout(number, data, asyncio.get_running_loop().create_future())
        async with self._host(alone) as host:
            host.take(rollout)
            try:
                return await self._watched(host, rollout, seconds_since_request)
            finally:
                host.cancel(rollout)  # nothing if it is over

    @asynccontextmanager
    async def _host(self, alone: bool) -> AsyncIterator[HostProcess]:
        """Which takes the next rollout; one alone waits until there is room for its own."""
        if not alone:
            yield self._next_host()
            return
        async with self._room:
            host = HostProcess(self.environment, self._mark)
            host.is_retiring = True  # it ends with the first rollout that it takes
            self._retiring.add(host)
            try:
                yield host
            finally:
                self._retiring = {each for each in self._retiring if each.child is not None}

    def _next_host(self) -> HostProcess:
        """The one with the fewest rollouts; those with one that will not end, or with many threads
        that will not, are replaced."""
        now_s = time.monotonic()
        for place, host in enumerate(self._hosts):
            if host.num_hung_threads >= MOST_HUNG_THREADS:
                self.num_replaced += 1
                logger.warning(
                    "environment %s: %d calls hang in threads of its host, which is replaced "
                    "(%d so far); bound what they wait for",
                    self.name,
                    host.num_hung_threads,
                    self.num_replaced,
                )
                self._retire(place)
                continue
            if any(now_s - since_s > self._cancel_grace_s for since_s in host.overdue.values()):
                self._retire(place)
        return min(self._hosts, key=lambda host: len(host.rollouts))

    async def _watched(
        self, host: HostProcess, rollout: Rollout, seconds_since_request: Callable[[], float]
    ) -> Outcome:
        limit_s = self.environment.idle_timeout_s
        look_s = min(LONGEST_LOOK_S, limit_s / 4)
        while True:
            await asyncio.wait([rollout.future], timeout=look_s)
            if rollout.future.done():
                return rollout.future.result()
            now_s = time.monotonic()
            host.look()
            if rollout.sent_s is None:  # the host is being started
                if now_s - host.asked_s > self.environment.start_timeout_s and host.alive:
                    host.kill("it took longer than start_timeout_s to load the environment")
            elif min(now_s - rollout.sent_s, seconds_since_request()) > limit_s:
                if (blocked := await self._end(host, rollout)) is not None:
                    raise HostDied(self.environment.name, blocked)
                raise RolloutHung(
                    self.environment.name,
                    f"a rollout made no request for {limit_s:g} s and was cancelled; bound what it "
                    "waits for, or raise idle_timeout_s",
                )

    async def _end(self, host: HostProcess, rollout: Rollout) -> str | None:
        """Cancels what hangs. A host that does not obey is killed, once nobody else needs it.

        Returns why the host, with all that is in it, is to blame and maybe not this rollout.
        """
        child, deadline_s = host.child, time.monotonic() + self._cancel_grace_s
        host.cancel(rollout)
        if host.is_retiring and not host.rollouts:  # it was alone there, and has ended the host
            return None
        while rollout.number in host.overdue and time.monotonic() < deadline_s:
            await asyncio.sleep(min(0.05, self._cancel_grace_s / 4))
        if host.child is not child:
            return "its host process ended meanwhile"
        if rollout.number not in host.overdue:
            return None
        others = host.rollouts.keys() | host.overdue.keys() - {rollout.number}
        if not host.beats and others:
            if host.alive:
                host.kill(f"a rollout blocked it, for {self._cancel_grace_s:g} s and longer")
            return "a rollout blocked its host process, this one or another"
        if not host.alive:
            return None
        if not host.beats or not host.rollouts:
            host.kill(f"a rollout hung and did not end {self._cancel_grace_s:g} s after")
        elif host in self._hosts:
            self._retire(self._hosts.index(host))
        return None

    def _retire(self, place: int) -> None:
        """A new host takes its place; it ends with the last rollout that can end."""
        host = self._hosts[place]
        self._hosts[place] = HostProcess(self.environment, self._mark)
        self._retiring = {each for each in self._retiring if each.child is not None} | {host}
        host.is_retiring = True
        if not host.rollouts and host.alive:
            host.kill("a rollout in it does not end")


def _record(prompt: Prompt) -> dict[str, Any]:
    """What a rollout is told of its prompt (``host.Prompt``)."""
    if prompt.messages is not None:
        messages = [dict(message) for message in prompt.messages]
    else:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages.append({"role": "user", "content": prompt.text})
    return {
        "text": prompt.text,
        "messages": messages,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "index": prompt.index,
        "epoch": prompt.epoch,
        "is_held_out": prompt.is_held_out,
    }
