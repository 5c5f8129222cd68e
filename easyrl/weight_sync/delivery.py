"""Delivery: a version goes to many endpoints at once, and the trainer is asked for them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.broadcasting import WATCH_INTERVAL_S, TensorTee
from easyrl.weight_sync.canary import Expected
from easyrl.weight_sync.proof import Shown
from easyrl.weight_sync.push import GIVING_UP_S
from easyrl.weight_sync.reconcile import Reconciler
from easyrl.weight_sync.target import Target


@dataclass(slots=True)
class Delivery:
    """How one version reached the endpoints: rank 0's, but all have lists and ``damage``."""

    target: Target | None
    passed: list[str] = field(default_factory=list)  # URLs
    owing: list[str] = field(default_factory=list)  # of them those that owe their canary
    damage: str | None = None  # of the copy on rank 0's host, which cost an endpoint the version
    shown: dict[str, Shown] = field(default_factory=dict)  # by URL, by those that passed
    num_broadcast: int | None = None  # endpoints that a broadcast reached; None: never asked for
    asking_s: float = 0.0  # seconds of the trainer's own forwards for the canary

    def metrics(self) -> dict[str, float]:
        """Seconds are those of the endpoint that took longest."""
        slowest = max(
            self.shown.values(), key=lambda s: s.probe_s + s.proof_s + s.canary_s, default=Shown()
        )
        found = {
            "time/probe_s": slowest.probe_s,
            "time/proof_s": slowest.proof_s,
            "sync/endpoints": float(len(self.passed)),
        }
        if self.target is not None:
            found["sync/bytes"] = float(sum(chunk.num_bytes for chunk in self.target.chunks))
        if self.num_broadcast is not None:
            found["sync/broadcast"] = float(self.num_broadcast)
        return found | self.canary_metrics()

    def canary_metrics(self) -> dict[str, float]:
        """Of those in ``shown`` that have passed it."""
        slowest_s = max((s.canary_s for s in self.shown.values()), default=0.0)
        found = {"time/canary_s": slowest_s + self.asking_s}
        if readings := [s.reading for s in self.shown.values() if s.reading is not None]:
            found["sync/canary_mean"] = max(reading.mean for reading in readings)
            found["sync/canary_max"] = max(reading.maximum for reading in readings)
        return found


@dataclass
class FanOut:
    """Brings ``target`` to ``endpoints``, each by a coroutine of its own. In the pool's loop.

    The trainer's log-probabilities are a collective of the main threads, so an endpoint's coroutine
    cannot ask for them itself: it leaves its canary samples here and waits. Whoever is ready, has
    passed or waits for the trainer, waits for the rest no longer than they may be silent.

    Attributes:
        canary: whether the trainer is asked about their samples.
        canary_follows: their canary may be owed (``Reconciler.reconcile``).
        owing: by URL, what those have shown that serve ``target`` and owe their canary, which is
            all that they are asked for.
        tee: what is broadcast first; whom that does not reach is pushed to.
        num_broadcast: how many the broadcast has reached.
    """

    reconciler: Reconciler
    endpoints: Sequence[Endpoint]
    target: Target
    canary: bool
    canary_follows: bool = False
    owing: Mapping[str, Shown] = field(default_factory=dict)
    tee: TensorTee | None = None
    num_broadcast: int = 0

    def __post_init__(self) -> None:
        self._num_passed = 0
        self._ready_s: float | None = None  # since when one is ready and waits for others
        self._num_open = len(self.endpoints)  # coroutines that have not ended
        self._questions: dict[str, tuple[Sequence[Completion], asyncio.Future[Expected]]] = {}
        self._changed = asyncio.Event()  # a question has come, or a coroutine has ended
        self._is_sampling = False  # an endpoint has proved its bits

    async def run(self) -> dict[str, Shown | EndpointError]:
        """What became of each, by URL. Raises what is no ``EndpointError``.

        ``EndpointUnavailable``: it is gone; another ``EndpointError``: it failed for good. After a
        cancellation endpoints are told to give up what they were being given.
        """
        tasks: list[asyncio.Task[Shown | EndpointError]] = []
        watch: asyncio.Task[None] | None = None
        try:
            if self.tee is not None:
                self.num_broadcast = await self.reconciler.broadcast(
                    self.endpoints, self.target, self.tee
                )
            tasks = [asyncio.create_task(self._bring(endpoint)) for endpoint in self.endpoints]
            watch = asyncio.create_task(self._leave_late(tasks))
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if watch is not None:
                watch.cancel()
            if self.tee is not None:
                self.tee.close()
            self._num_open = 0
            self._changed.set()
        return {e.url: outcome for e, outcome in zip(self.endpoints, outcomes, strict=True)}

    async def sampling(self) -> bool:
        """Waits until an endpoint makes its canary samples; False if all have, or have ended.

        Before that the loop has answers to look after, which the trainer's work would hold up.
        """
        while not self._is_sampling and self._num_open > len(self._questions):
            self._changed.clear()
            await self._changed.wait()
        return self._num_open > len(self._questions)

    async def questions(self) -> dict[str, Sequence[Completion]]:
        """Canary samples by URL, when every coroutine has asked or ended; none at the end."""
        while self._num_open > len(self._questions):
            self._changed.clear()
            await self._changed.wait()
        return {url: samples for url, (samples, _) in self._questions.items()}

    async def answer(self, expected: Mapping[str, Expected]) -> None:
        """What the trainer says of the samples of ``questions``."""
        self._ready_s = None  # what they owe after this starts anew
        asked, self._questions = self._questions, {}
        for url, (_, answer) in asked.items():
            if not answer.done():  # it may have gone down while it waited
                answer.set_result(expected[url])

    def _sampling(self) -> None:
        self._is_sampling = True
        self._changed.set()

    async def _bring(self, endpoint: Endpoint) -> Shown | EndpointError:
        try:
            shown = await self._shown_by(endpoint)
            self._num_passed += 1
            return shown
        except EndpointError as error:
            if isinstance(error, EndpointUnavailable) and endpoint.down is None:
                self.reconciler.pool.set_aside(endpoint, error)
            return error
        finally:
            self._num_open -= 1
            self._changed.set()

    async def _shown_by(self, endpoint: Endpoint) -> Shown:
        reconciler, target = self.reconciler, self.target
        if (shown := self.owing.get(endpoint.url)) is not None:
            return await reconciler.compare(endpoint, target, self._ask, shown, self._sampling)
        return await reconciler.reconcile(
            endpoint,
            target,
            self._ask if self.canary else None,
            self._sampling,
            canary_follows=self.canary and self.canary_follows,
        )

    async def _leave_late(self, tasks: Sequence[asyncio.Task[Shown | EndpointError]]) -> None:
        """Ends the waiting for endpoints that answer each request in time, and slowly.

        The clock runs over all their answers, from when another is ready. A silent one fails by the
        limit of a single request before.
        """
        patience_s = self.reconciler.timeout_s + GIVING_UP_S
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if not self._questions and not self._num_passed:
                continue
            self._ready_s = self._ready_s or time.monotonic()
            if time.monotonic() - self._ready_s < patience_s:
                continue
            for endpoint, task in zip(self.endpoints, tasks, strict=True):
                owes = not task.done() and endpoint.url not in self._questions
                if owes and endpoint.down is None:
                    self.reconciler.late(endpoint, self.target.version)

    async def _ask(self, url: str, samples: Sequence[Completion]) -> Expected:
        answer: asyncio.Future[Expected] = asyncio.get_running_loop().create_future()
        self._questions[url] = samples, answer
        self._changed.set()
        try:
            return await answer
        finally:
            self._questions.pop(url, None)
