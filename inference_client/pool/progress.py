"""Whether an endpoint goes on generating though it has answered nothing for long."""

from __future__ import annotations

import re

import aiohttp

from easyrl.inference_client.pool.endpoint import Endpoint

# vLLM's names, which the embedded server uses too; a line per engine.
_COUNTERS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)", re.M)


class TokenCounter:
    """Reads how many tokens endpoints have made so far from ``/metrics``.

    A response is one answer at its end: of the last long one of a batch nothing else is seen.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._seen: dict[Endpoint, float] = {}

    async def have_grown(self, endpoint: Endpoint, timeout_s: float) -> bool:
        """Whether it has made tokens since it was last asked; False if it does not tell."""
        count = await self._count(endpoint.url, timeout_s)
        before = self._seen.get(endpoint)
        if count is None:
            return False
        self._seen[endpoint] = count
        return before is not None and count != before

    def forget(self, endpoint: Endpoint) -> None:
        self._seen.pop(endpoint, None)

    async def _count(self, url: str, timeout_s: float) -> float | None:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(url + "/metrics", timeout=limit) as response:
                content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        counts = [float(text) for text in _COUNTERS.findall(content)]
        return sum(counts) if response.status == 200 and counts else None
