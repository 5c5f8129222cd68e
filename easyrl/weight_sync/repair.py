"""Endpoints that come back, or are new, in the middle of a batch: brought to the served version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.pool import Endpoint, EndpointPool
from easyrl.inference_client.transfer.artifact import Chunk
from easyrl.schema import Confirmation
from easyrl.weight_sync.canary import CanaryReading, Expected
from easyrl.weight_sync.delivery import ANSWER_TIMEOUT_S, Superseded, WeightStream
from easyrl.weight_sync.round import WeightRounds

RETRY_INTERVAL_S = 1.0  # between questions whether rank 0 has repaired an endpoint


@dataclass(frozen=True, slots=True)
class Served:
    """The version that endpoints serve until the next one, and what proves it."""

    weights: WeightStream
    expected: Expected | None  # with a canary: what the trainer said of it

    @property
    def version(self) -> str:
        return self.weights.version

    def to_json(self) -> dict[str, Any]:
        """For the other ranks: hashes of the weights, not the weights."""
        return {
            "name": self.weights.name,
            "version": self.version,
            "chunks": [chunk.describe() for chunk in self.weights.chunks],
            "expected": None if self.expected is None else self.expected.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Served:
        weights = WeightStream(record["name"], record["version"])
        for chunk in record["chunks"]:
            weights.add(Chunk(**chunk))
        weights.complete()
        expected = record["expected"]
        return cls(weights, None if expected is None else Expected.from_json(expected))


class Repairs:
    """Brings endpoints to what is served now. In the pool's loop.

    Args:
        pushes: rank 0, which has the weights. Other ranks wait until the endpoint stamps the
            version, as it does once rank 0 has seen its proof, and have it prove itself to them
            too: a sync stamps before the proof, and may have missed it.
        patience_s: how long another rank waits for rank 0.
    """

    def __init__(
        self, pool: EndpointPool, rounds: WeightRounds, *, pushes: bool, patience_s: float
    ) -> None:
        self._pool = pool
        self._rounds = rounds
        self._pushes = pushes
        self._patience_s = patience_s
        self._served: Served | None = None  # None while the weights move
        self._settled = asyncio.Event()  # they do not move
        self._confirmations: dict[str, Confirmation] = {}  # of the served version, by URL

    @property
    def confirmations(self) -> tuple[Confirmation, ...]:
        """Of every endpoint that has proved the served version, by URL."""
        return tuple(confirmation for _, confirmation in sorted(self._confirmations.items()))

    async def suspend(self) -> None:
        """The weights are about to move: no endpoint serves a known version."""
        self._served = None
        self._settled.clear()
        self._pool.withdraw_confirmations()

    async def go_on(self, served: Served, readings: Mapping[str, CanaryReading | None]) -> None:
        """``served`` is the version now; the URLs of ``readings`` have proved it."""
        self._served = served
        self._confirmations = {url: self._confirmation(url, r) for url, r in readings.items()}
        for endpoint in self._pool.endpoints:
            if endpoint.url in readings and endpoint.excluded is None and not endpoint.leaving:
                self._pool.confirm(endpoint, served.version)
        self._settled.set()

    async def end(self) -> None:
        """Nothing is served any more."""
        self._served = None
        self._settled.set()

    async def repair(self, endpoint: Endpoint) -> None:
        """Has ``endpoint`` prove the served version and confirms it; waits while the weights move.

        Raises ``EndpointUnavailable`` if it is gone again, another ``EndpointError`` if it failed.
        """
        while True:
            await self._settled.wait()
            served = self._served
            if served is None or endpoint.confirmed_version == served.version:
                return  # ended, or published meanwhile
            try:
                reading = await self._bring_to(endpoint, served)
            except Superseded:
                continue
            if self._served is served:
                url = endpoint.url
                self._confirmations[url] = self._confirmation(url, reading)
                self._pool.confirm(endpoint, served.version)

    def _confirmation(self, url: str, reading: CanaryReading | None) -> Confirmation:
        assert self._served is not None
        mean = None if reading is None else reading.mean
        return Confirmation(url, self._served.version, self._rounds.proves_bits, mean)

    async def _bring_to(self, endpoint: Endpoint, served: Served) -> CanaryReading | None:
        """Raises ``EndpointError``, ``Superseded``."""

        def wanted() -> bool:
            return self._served is served

        if self._pushes:
            return await self._rounds.bring_back(endpoint, served.weights, served.expected, wanted)
        return await self._until_proved(endpoint, served, wanted)

    async def _until_proved(
        self, endpoint: Endpoint, served: Served, wanted: Callable[[], bool]
    ) -> CanaryReading | None:
        """Waits for rank 0's push and for the proof, which rank 0 may have to push for twice."""
        deadline_s = time.monotonic() + self._patience_s
        while wanted():
            try:
                shown = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
                if shown == served.version:
                    return await self._rounds.examine(endpoint, served.weights, served.expected)
            except EndpointError as error:
                shown = error.reason
            if time.monotonic() >= deadline_s:
                reason = f"shows {shown}, not {served.version}, {self._patience_s:g} s later"
                raise EndpointUnavailable(endpoint.url, reason)
            await asyncio.sleep(RETRY_INTERVAL_S)
        raise Superseded
