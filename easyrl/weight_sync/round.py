"""Pushes to several endpoints at once and has each prove it; or to one, in the middle of a batch.

Everything here runs on the pool's loop, beside the trainer's main thread. Rank 0 pushes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.pool import Endpoint
from easyrl.schema import Completion
from easyrl.weight_sync.broadcasting import Broadcaster, BroadcastFailed
from easyrl.weight_sync.canary import Canary, CanaryReading, Expected
from easyrl.weight_sync.delivery import (
    Superseded,
    WeightPusher,
    WeightStream,
    still_answers,
    while_up,
)
from easyrl.weight_sync.feed import Feed
from easyrl.weight_sync.proof import Probe, ProofFailed, check_canary, check_stamp, prove_weights

logger = logging.getLogger(__name__)
T = TypeVar("T")

PUSH_ATTEMPTS = 2  # pushed, checked, pushed again, checked again, then excluded


@dataclass(slots=True)
class Spans:
    """Seconds that the batch waited for the proof."""

    probe_s: float = 0.0
    proof_s: float = 0.0  # version and checksums
    canary_s: float = 0.0

    def add(self, other: Spans) -> None:
        self.probe_s += other.probe_s
        self.proof_s += other.proof_s
        self.canary_s += other.canary_s


@dataclass(slots=True)
class Round:
    """What became of one push to several endpoints, by URL."""

    served: list[str] = field(default_factory=list)  # pushed, proved and sampled from
    broadcast: list[str] = field(default_factory=list)  # pushed by one broadcast
    samples: dict[str, list[Completion]] = field(default_factory=dict)
    failed: dict[str, EndpointError] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)


class WeightRounds:
    """Pushes and proofs.

    Args:
        tolerance: of the canary's mean |Δ log-prob|, nats.
        prove: whether endpoints prove the bits of what they serve.
        broadcaster: takes what it can, the rest is pushed.
    """

    def __init__(
        self,
        pusher: WeightPusher,
        canary: Canary,
        *,
        tolerance: float,
        prove: bool,
        broadcaster: Broadcaster | None = None,
    ) -> None:
        self._pusher = pusher
        self._canary = canary
        self._tolerance = tolerance
        self.proves_bits = prove
        self._broadcaster = broadcaster
        self._probed: set[str] = set()  # URLs that have shown the probe's change since they started
        self._moved: dict[str, float] = {}  # by URL, nats by which the probe it is to undo moved it
        self.probe: Probe | None = None

    async def deliver(
        self,
        endpoints: Sequence[Endpoint],
        weights: WeightStream,
        *,
        canary: bool,
        feed: Feed | None = None,
    ) -> Round:
        """Brings ``weights`` to all at once, then all prove, then all are sampled from.

        By a broadcast if there is a ``feed`` of it; what that does not reach is pushed. Errors
        become part of the result; an endpoint that goes down in the middle is not waited for.
        """
        result = Round()

        async def push(endpoint: Endpoint) -> None:
            await self._show_probe(endpoint, _always, result.spans)
            await self._pusher.push(endpoint, weights, _always)

        async def prove(endpoint: Endpoint) -> None:
            await self._prove(endpoint, weights)

        async def sample(endpoint: Endpoint) -> None:
            result.samples[endpoint.url] = await self._sample(endpoint, weights)

        if feed is not None:
            await self._broadcast(endpoints, weights, feed, result)
        reached = [endpoint for endpoint in endpoints if endpoint.url in result.broadcast]
        missing = [e for e in endpoints if e not in reached and e.url not in result.failed]
        pushed = reached + await _all_at_once(missing, push, result.failed)
        start_s = time.monotonic()
        proved = await _all_at_once(pushed, prove, result.failed)
        result.spans.proof_s = time.monotonic() - start_s
        start_s = time.monotonic()
        served = await _all_at_once(proved, sample, result.failed) if canary else proved
        result.spans.canary_s = time.monotonic() - start_s
        result.served = [endpoint.url for endpoint in served]
        return result

    async def bring_back(
        self,
        endpoint: Endpoint,
        weights: WeightStream,
        expected: Expected | None,
        wanted: Callable[[], bool],
    ) -> CanaryReading | None:
        """Has an endpoint serve the served weights in mid-batch, without the trainer.

        If it has only been away it just proves them again, else they are pushed. Other ranks have
        confirmed the version and use whoever stamps it: it is stamped after the proof.
        ``expected``: what the trainer said of these weights' canary, which is read then. Raises
        ``EndpointUnavailable`` if it has gone again, ``ProofFailed`` when it failed twice,
        ``Superseded`` as soon as ``wanted`` says no.
        """
        was_away = await self._was_only_away(endpoint, weights)
        for attempts_left in reversed(range(PUSH_ATTEMPTS + was_away)):
            try:
                if was_away and attempts_left == PUSH_ATTEMPTS:
                    return await self.examine(endpoint, weights, expected)
                return await self._push_and_examine(endpoint, weights, expected, wanted)
            except EndpointError as error:
                if not wanted():  # what failed may have been overtaken by the next version
                    raise Superseded from error
                gone = isinstance(error, EndpointUnavailable) and not await still_answers(endpoint)
                if gone:
                    raise
                self.distrust(endpoint.url)
                logger.warning("weight sync: %s", error)
                if not attempts_left:
                    raise ProofFailed(endpoint.url, error.reason) from error
        raise AssertionError("the last attempt returns or raises")

    async def _was_only_away(self, endpoint: Endpoint, weights: WeightStream) -> bool:
        """Whether it was given ``weights``, is trusted and has not restarted."""
        if self.probe is not None and endpoint.url not in self._probed:
            return False
        try:
            return await self._pusher.still_serves(endpoint, weights.version)
        except EndpointError:
            return False  # a push will tell why

    async def _push_and_examine(
        self,
        endpoint: Endpoint,
        weights: WeightStream,
        expected: Expected | None,
        wanted: Callable[[], bool],
    ) -> CanaryReading | None:
        """It stamps their version once they are proved. Raises as ``bring_back`` does."""
        unproven = weights.unproven()
        await self._show_probe(endpoint, wanted, Spans())
        await self._pusher.push(endpoint, unproven, wanted)
        reading = await self.examine(endpoint, unproven, expected)
        await self._pusher.stamp(endpoint, weights.version, wanted)
        await self._prove(endpoint, weights)  # it may have restarted just before the stamp
        return reading

    async def examine(
        self, endpoint: Endpoint, weights: WeightStream, expected: Expected | None
    ) -> CanaryReading | None:
        """Version, checksums and canary, without the trainer. Raises ``EndpointError``."""
        await self._prove(endpoint, weights)
        if expected is None:
            return None
        reading = expected.reading(await self._sample(endpoint, weights))
        if problem := check_canary(reading, self.tolerance(endpoint.url)):
            raise ProofFailed(endpoint.url, problem)
        self.is_back(endpoint.url)
        return reading

    def trust(self, url: str, visible: float) -> None:
        """It has shown the probe's change, of ``visible`` nats."""
        self._probed.add(url)
        self._moved[url] = visible

    def distrust(self, url: str) -> None:
        """It has to show the probe's change again."""
        self._probed.discard(url)
        self._moved.pop(url, None)

    def tolerance(self, url: str) -> float:
        """Of its canary, nats.

        After the probe it has to come back much nearer than half-way: keys and values of the canary
        that were left from the probe's weights show, also where its change is below the tolerance.
        """
        return min(self._tolerance, self._moved.get(url, np.inf) / 2)

    def is_back(self, url: str) -> None:
        """Its canary is that of the true weights."""
        self._moved.pop(url, None)

    async def _broadcast(
        self, endpoints: Sequence[Endpoint], weights: WeightStream, feed: Feed, result: Round
    ) -> None:
        """To all that have shown the probe's change, or to none."""
        assert self._broadcaster is not None
        broadcaster = self._broadcaster

        async def show(endpoint: Endpoint) -> None:
            await self._show_probe(endpoint, _always, result.spans)

        async def send(restarts: Mapping[str, int]) -> None:
            await broadcaster.send(ready, restarts, weights.version, feed)

        try:
            ready = await _all_at_once(endpoints, show, result.failed)
            if ready:
                await self._pusher.push_together(ready, weights.version, send)
                result.broadcast = [endpoint.url for endpoint in ready]
        except (BroadcastFailed, EndpointError) as error:
            logger.warning(
                "weight sync: the broadcast of %s failed, it goes by artefact: %s",
                weights.version,
                error,
            )
        finally:
            feed.close()
        if result.broadcast:
            await weights.completed()  # the proof reads the host's copy

    async def _show_probe(
        self, endpoint: Endpoint, wanted: Callable[[], bool], spans: Spans
    ) -> None:
        """Makes an endpoint that is new or has restarted show the probe's change.

        The true weights follow, and their canary: what it forgot to forget shows in either.
        """
        if await self._pusher.has_restarted(endpoint):
            self.distrust(endpoint.url)
        if self.probe is None or endpoint.url in self._probed:
            return
        start_s = time.monotonic()
        weights = self.probe.weights
        await self._pusher.push(endpoint, weights, wanted)
        await self._prove(endpoint, weights)
        samples = await self._sample(endpoint, weights)
        if problem := self.probe.check(samples, self._tolerance):
            raise ProofFailed(endpoint.url, problem)
        self.trust(endpoint.url, self.probe.visible(samples))
        spans.probe_s = max(spans.probe_s, time.monotonic() - start_s)

    async def _prove(self, endpoint: Endpoint, weights: WeightStream) -> None:
        await prove_weights(endpoint, weights, bits=self.proves_bits)

    async def _sample(self, endpoint: Endpoint, weights: WeightStream) -> list[Completion]:
        samples = await self._canary.sample(endpoint.url)
        check_stamp(endpoint, samples, weights.version)
        return samples


async def _all_at_once(
    endpoints: Sequence[Endpoint],
    work: Callable[[Endpoint], Awaitable[None]],
    failed: dict[str, EndpointError],
) -> list[Endpoint]:
    """Those that ``work`` succeeded with; errors of the others go to ``failed``."""

    async def attempt(endpoint: Endpoint) -> Endpoint | None:
        try:
            await while_up(endpoint, work(endpoint))
        except EndpointError as error:
            failed[endpoint.url] = error
            return None
        return endpoint

    done = await asyncio.gather(*map(attempt, endpoints))
    return [endpoint for endpoint in done if endpoint is not None]


def _always() -> bool:
    return True
