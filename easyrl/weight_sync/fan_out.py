"""Reconciliation of all endpoints at once, and the trainer's answers to their canaries.

The trainer's log-probabilities are a collective of the main threads, so an endpoint's coroutine
cannot ask for them itself: it leaves its canary samples here and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.broadcasting import Broadcaster
from easyrl.weight_sync.canary import Expected
from easyrl.weight_sync.proof import Shown
from easyrl.weight_sync.reconcile import Reconciler
from easyrl.weight_sync.target import WeightStream
from easyrl.weight_sync.tee import TensorTee


class FanOut:
    """Brings ``weights`` to ``endpoints``, each by a coroutine of its own. In the pool's loop.

    Args:
        canary: whether the trainer is asked about their samples.
        tee: what is broadcast first, by ``broadcaster``; whom it does not reach is pushed to.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        endpoints: Sequence[Endpoint],
        weights: WeightStream,
        *,
        canary: bool,
        broadcaster: Broadcaster | None = None,
        tee: TensorTee | None = None,
    ) -> None:
        self._reconciler = reconciler
        self._endpoints = endpoints
        self._weights = weights
        self._canary = canary
        self._broadcaster = broadcaster
        self._tee = tee
        self._broadcast: asyncio.Task[list[str]] | None = None
        self._tasks: dict[str, asyncio.Task[Shown]] = {}  # by URL
        self._questions: dict[str, tuple[Sequence[Completion], asyncio.Future[Expected]]] = {}
        self._changed = asyncio.Event()  # a question has come, or a task has ended

    async def start(self) -> None:
        if self._broadcaster is not None and self._tee is not None:
            self._broadcast = asyncio.create_task(
                self._reconciler.broadcast(
                    self._endpoints, self._weights, self._broadcaster, self._tee
                )
            )
        for endpoint in self._endpoints:
            task = asyncio.create_task(self._bring(endpoint))
            task.add_done_callback(lambda _: self._changed.set())
            self._tasks[endpoint.url] = task

    async def questions(self) -> dict[str, Sequence[Completion]]:
        """Canary samples by URL, when every coroutine has asked or ended; none at the end."""
        while sum(not task.done() for task in self._tasks.values()) > len(self._questions):
            self._changed.clear()
            await self._changed.wait()
        return {url: samples for url, (samples, _) in self._questions.items()}

    async def answer(self, expected: Mapping[str, Expected]) -> None:
        """What the trainer says of the samples of ``questions``."""
        asked, self._questions = self._questions, {}
        for url, (_, answer) in asked.items():
            if not answer.done():  # it may have gone down while it waited
                answer.set_result(expected[url])

    async def outcomes(self) -> dict[str, Shown | EndpointError]:
        """By URL, once there are no more questions. Raises what is no ``EndpointError``.

        ``EndpointUnavailable``: it is gone; another ``EndpointError``: it failed for good.
        """
        found: dict[str, Shown | EndpointError] = {}
        for url, task in self._tasks.items():
            try:
                found[url] = await task
            except EndpointError as error:
                found[url] = error
        return found

    async def num_broadcast(self) -> int:
        """How many the broadcast reached."""
        return 0 if self._broadcast is None else len(await self._broadcast)

    async def cancel(self) -> None:
        """Ends all; endpoints are told to give up what they were being given."""
        for task in (self._broadcast, *self._tasks.values()):
            if task is not None:
                task.cancel()
        if self._tee is not None:
            self._tee.close()

    async def _bring(self, endpoint: Endpoint) -> Shown:
        if self._broadcast is not None:
            await asyncio.wait([self._broadcast])
        expect = self._ask if self._canary else None
        return await self._reconciler.reconcile(endpoint, self._weights, expect)

    async def _ask(self, url: str, samples: Sequence[Completion]) -> Expected:
        answer: asyncio.Future[Expected] = asyncio.get_running_loop().create_future()
        self._questions[url] = samples, answer
        self._changed.set()
        try:
            return await answer
        finally:
            self._questions.pop(url, None)
