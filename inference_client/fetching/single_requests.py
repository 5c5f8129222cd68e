"""Orders for single samples, each an HTTP request of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import Fetch
from easyrl.inference_client.fetching.messages import Send
from easyrl.schema import Completion

# told of orders: the response of one, or the error that ended all of them, and when they were sent
Answered: TypeAlias = Callable[[Sequence[Send], Completion | Exception, float], None]


class SingleRequests:
    """Those in flight."""

    def __init__(
        self, fetch: Fetch, api_keys: ApiKeys, adapters: AdapterNames, answered: Answered
    ) -> None:
        self._fetch, self._api_keys, self._adapters = fetch, api_keys, adapters
        self._answered = answered
        # that of a run's requests is the same
        self._sampling = functools.lru_cache(maxsize=16)(SamplingConfig.model_validate_json)
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by number of the order

    @property
    def in_flight(self) -> bool:
        """There are some."""
        return bool(self._tasks)

    def add(self, order: Send) -> None:
        self._tasks[order.number] = self._loop.create_task(self._respond(order))

    def cancel(self, number: int) -> None:
        """Nothing happens if it was answered."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _respond(self, order: Send) -> None:
        start_s = self._loop.time()
        try:
            prompt = np.frombuffer(order.prompt, np.int32)
            sampling = self._sampling(order.sampling)
            self._api_keys.learn(order.url, order.api_key)
            self._adapters.learn(order.url, order.model)
            result: Completion | Exception
            result = await self._fetch(order.url, prompt, sampling, order.seed)
        except Exception as error:
            result = error
        finally:
            del self._tasks[order.number]
        self._answered([order], result, start_s)
