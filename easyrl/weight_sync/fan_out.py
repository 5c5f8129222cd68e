"""Reconciliation of all endpoints at once, and the trainer's answers to their canaries.

The trainer's log-probabilities are a collective of the main threads, so an endpoint's coroutine
cannot ask for them itself: it leaves its canary samples here and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.broadcasting import TensorTee
from easyrl.weight_sync.canary import Expected
from easyrl.weight_sync.proof import Shown
from easyrl.weight_sync.reconcile import Reconciler
from easyrl.weight_sync.target import Target


class FanOut:
    """Brings ``target`` to ``endpoints``, each by a coroutine of its own. In the pool's loop.

    Args:
        canary: whether the trainer is asked about their samples.
        tee: what is broadcast first; whom that does not reach is pushed to.

    Attributes:
        num_broadcast: how many the broadcast has reached.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        endpoints: Sequence[Endpoint],
        target: Target,
        *,
        canary: bool,
        tee: TensorTee | None = None,
    ) -> None:
        self.num_broadcast = 0
        self._reconciler = reconciler
        self._endpoints = endpoints
        self._target = target
        self._expect = self._ask if canary else None
        self._tee = tee
        self._num_open = len(endpoints)  # coroutines that have not ended
        self._questions: dict[str, tuple[Sequence[Completion], asyncio.Future[Expected]]] = {}
        self._changed = asyncio.Event()  # a question has come, or a coroutine has ended

    async def run(self) -> dict[str, Shown | EndpointError]:
        """What became of each, by URL. Raises what is no ``EndpointError``.

        ``EndpointUnavailable``: it is gone; another ``EndpointError``: it failed for good. After a
        cancellation endpoints are told to give up what they were being given.
        """
        tasks: list[asyncio.Task[Shown | EndpointError]] = []
        try:
            if self._tee is not None:
                self.num_broadcast = len(
                    await self._reconciler.broadcast(self._endpoints, self._target, self._tee)
                )
            tasks = [asyncio.create_task(self._bring(endpoint)) for endpoint in self._endpoints]
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if self._tee is not None:
                self._tee.close()
            self._num_open = 0
            self._changed.set()
        return {e.url: outcome for e, outcome in zip(self._endpoints, outcomes, strict=True)}

    async def questions(self) -> dict[str, Sequence[Completion]]:
        """Canary samples by URL, when every coroutine has asked or ended; none at the end."""
        while self._num_open > len(self._questions):
            self._changed.clear()
            await self._changed.wait()
        return {url: samples for url, (samples, _) in self._questions.items()}

    async def answer(self, expected: Mapping[str, Expected]) -> None:
        """What the trainer says of the samples of ``questions``."""
        asked, self._questions = self._questions, {}
        for url, (_, answer) in asked.items():
            if not answer.done():  # it may have gone down while it waited
                answer.set_result(expected[url])

    async def _bring(self, endpoint: Endpoint) -> Shown | EndpointError:
        try:
            return await self._reconciler.reconcile(endpoint, self._target, self._expect)
        except EndpointError as error:
            return error
        finally:
            self._num_open -= 1
            self._changed.set()

    async def _ask(self, url: str, samples: Sequence[Completion]) -> Expected:
        answer: asyncio.Future[Expected] = asyncio.get_running_loop().create_future()
        self._questions[url] = samples, answer
        self._changed.set()
        try:
            return await answer
        finally:
            self._questions.pop(url, None)
