"""Requests for responses, sent and decoded in processes of their own: the fetchers.

A response of 1,000 tokens is 140 kB of JSON. Reading that beside the trainer would slow it down, so
that a fetcher does, and what comes back here are two arrays and a few words (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from easyrl.completion_check import ANY_INT32, Vocabulary
from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.fetching.fetcher import Fetcher, Request
from easyrl.inference_client.fetching.messages import Send, Settings
from easyrl.inference_client.fetching.suspects import Suspects
from easyrl.schema import Completion

# Of the time that a reply took, for which it may wait for others: each delivery takes the
# interpreter from the training loop for a moment.
DELIVERY_DELAY = 0.02
SAMPLING_FIELDS = set(SamplingConfig.model_fields)  # not those of its subclasses


class FetcherPool:
    """A ``Fetch`` (see ``local_fetch``) by ``num_fetchers`` processes.

    A fetcher that dies or hangs is replaced and its requests are sent again, with the same seeds
    (``Suspects``); the one whose answer did it raises ``MalformedResponse``. ``FetcherDied`` if no
    process comes up. ``close`` leaves none behind; on Linux neither does a parent that is killed.

    Args:
        is_awaited: somebody waits for each reply (an environment, for its turn): none waits for
            others.
    """

    def __init__(
        self,
        num_fetchers: int,
        api_keys: ApiKeys | None = None,
        *,
        vocabulary: Vocabulary = ANY_INT32,
        adapters: AdapterNames | None = None,
        is_awaited: bool = False,
    ) -> None:
        settings = Settings(vocabulary, 0.0 if is_awaited else DELIVERY_DELAY)
        self._suspects = Suspects(settings)
        self._fetchers = [Fetcher(settings, self._suspects.add) for _ in range(num_fetchers)]
        self._api_keys, self._adapters = api_keys or ApiKeys(), adapters or AdapterNames()
        self._numbers = itertools.count()
        self._sampling: SamplingConfig | None = None  # what was last asked for, and as JSON
        self._encoded = b""
        self._running = False

    async def start(self) -> None:
        """Starts the processes; calls belong to this loop, and its thread, from now on."""
        self._running = True
        for fetcher in self._fetchers:
            fetcher.ensure_started()

    async def close(self) -> None:
        """Cancels all requests and ends the processes. Safe to call twice."""
        self._running = False
        for request in self._suspects.waiting:
            request.future.cancel()
        fetchers = (*self._fetchers, self._suspects.fetcher)
        await asyncio.gather(*(fetcher.close() for fetcher in fetchers))
        for fetcher in fetchers:
            for request in fetcher.requests.values():
                request.future.cancel()

    async def __call__(
        self, url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        return await self._ask(url, prompt_token_ids, sampling, seed, is_streamed=False)

    async def streamed(
        self, url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        """The same of an endpoint that streams samples: asked for together with others."""
        return await self._ask(url, prompt_token_ids, sampling, seed, is_streamed=True)

    async def _ask(
        self,
        url: str,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        *,
        is_streamed: bool,
    ) -> Completion:
        if not self._running:
            raise RuntimeError("the fetchers are not running")
        prompt = np.asarray(prompt_token_ids, dtype=np.int32).tobytes()
        if sampling is not self._sampling:  # that of a run's requests is one object
            self._sampling = sampling
            self._encoded = sampling.model_dump_json(include=SAMPLING_FIELDS).encode()
        message = Send(
            next(self._numbers),
            url,
            prompt,
            self._encoded,
            seed,
            self._api_keys.of(url),
            is_streamed,
            self._adapters.of(url),
        )
        request = Request(message, asyncio.get_running_loop().create_future())
        min(self._fetchers, key=lambda fetcher: len(fetcher.requests)).take(request)
        try:
            return await request.future
        finally:
            if request.fetcher is not None:  # cancelled
                request.fetcher.drop(request)
