"""The canary prompt: whether an endpoint that refuses a prompt would serve any."""

from __future__ import annotations

import asyncio

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.inference_client.client import Fetch
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.endpoint import Endpoint

FIRST_IDS = np.arange(1, 9, dtype=np.int32)  # every vocabulary has them


class CanaryPrompt:
    """A short prompt that is known to be fine, asked for where another was refused.

    Consumes: endpoints that have refused a prompt. Waits for: one response token. Produces: what is
    wrong with the endpoint, if anything is. One request at a time for each, however many ask.
    """

    def __init__(self, fetch: Fetch, timeout_s: float) -> None:
        self.token_ids = FIRST_IDS  # int32 [P]
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._asked: dict[Endpoint, asyncio.Task[EndpointError | None]] = {}

    async def problem(self, endpoint: Endpoint, sampling: SamplingConfig) -> EndpointError | None:
        """Why ``endpoint`` does not serve it; None if it does.

        ``sampling``: of the refused request, of which all is asked for but the length.
        """
        task = self._asked.get(endpoint)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(endpoint, sampling))
            self._asked[endpoint] = task
            task.add_done_callback(lambda _: self._asked.pop(endpoint, None))
        return await asyncio.shield(task)  # others wait for it too

    async def close(self) -> None:
        """Gives up what is under way. Safe to call twice."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, endpoint: Endpoint, sampling: SamplingConfig) -> EndpointError | None:
        prompt = self.token_ids[: endpoint.context - 1] if endpoint.context else self.token_ids
        few = {"max_tokens": 1, "min_tokens": min(1, sampling.min_tokens)}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._fetch(endpoint.url, prompt, sampling.model_copy(update=few), 0)
        except TimeoutError:
            reason = f"did not serve the canary prompt within {self._timeout_s:g} s"
            return EndpointUnavailable(endpoint.url, reason)
        except EndpointError as error:
            return error
        return None
