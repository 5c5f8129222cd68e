"""Pushing a version of the weights to one endpoint, chunk by chunk while they are being written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable
from easyrl.inference_client.pool.pool import Endpoint
from easyrl.inference_client.transfer.artifact import Chunk

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_CHUNKS = 16  # per request, so that a new version need not wait long for an old one to give up
ANSWER_TIMEOUT_S = 10.0  # of a route that touches no weight
GIVING_UP_S = 10.0  # to leave an endpoint in order behind us
WATCH_INTERVAL_S = 0.2  # between looks at what the pool says of an endpoint


class Superseded(Exception):
    """The weights have moved on: what was being pushed is wanted no longer."""


class WeightStream:
    """The chunks of one version in the order of writing. Belongs to the loop.

    Args:
        name: of the artefact, a single path component.
        version: that the endpoints stamp on their tokens.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.chunks: list[Chunk] = []
        self._complete = False
        self._grown = asyncio.Event()

    def add(self, chunk: Chunk) -> None:
        """``chunk`` can be read from now on."""
        self.chunks.append(chunk)
        self._tell()

    def complete(self) -> None:
        """No further chunk will come."""
        self._complete = True
        self._tell()

    async def completed(self) -> None:
        """Waits until all chunks are there."""
        while not self._complete:
            await self._grown.wait()

    def unproven(self) -> WeightStream:
        """The same chunks, which have to be complete, under a version that no request asks for."""
        assert self._complete
        stream = WeightStream(self.name, f"{self.version}:unproven")
        stream.chunks = self.chunks
        stream._complete = True
        return stream

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """All chunks from the first, at each turn those written since; waits for the writer."""
        sent = 0
        while True:
            grown = self._grown
            if batch := self.chunks[sent : sent + MOST_CHUNKS]:
                sent += len(batch)
                yield batch
            elif self._complete:
                return
            else:
                await grown.wait()

    def _tell(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class Announcer(Protocol):
    """Says how an endpoint reaches the artefacts (``WeightStore``)."""

    async def init_info(self, url: str) -> Mapping[str, Any]: ...


class WeightPusher:
    """Pushes to endpoints and remembers what each was given. On rank 0, in the pool's loop."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._given: dict[str, str] = {}  # by URL, what it serves unless it has restarted
        self._initialised: set[str] = set()  # by URL, knows where the artefacts are
        self._restarts: Counter[str] = Counter()  # by URL, how often it was new or had restarted
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def has_restarted(self, endpoint: Endpoint) -> bool:
        """Whether it serves something else than it was given; true of one that is new.

        Raises ``EndpointError``.
        """
        served = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
        if served == self._given.get(endpoint.url):
            return False
        self._initialised.discard(endpoint.url)
        self._restarts[endpoint.url] += 1
        return True

    async def push(
        self, endpoint: Endpoint, weights: WeightStream, wanted: Callable[[], bool]
    ) -> None:
        """Brings all of ``weights`` to ``endpoint``, which serves them under their version.

        Consumes: the stream's chunks. Waits for: the push before, the endpoint's running requests,
        the writer. Is unblocked by: the endpoint's answers, or the pool finding it down. Raises
        ``EndpointError``, then the endpoint has been told to abandon the update and to go on with
        what it had, or ``Superseded`` as soon as ``wanted`` says no.
        """
        async with self._busy[endpoint.url]:
            if not wanted():  # the lock may have been waited for
                raise Superseded
            client = endpoint.client
            try:
                await self._prepare(endpoint)
                await _open_update(client)
                async for chunks in weights.batches():
                    if not wanted():
                        raise Superseded
                    described = [chunk.describe() for chunk in chunks]
                    await client.update_weights({"artifact": weights.name, "chunks": described})
                self._given[endpoint.url] = weights.version
                await client.finish_weight_update(weights.version)
                await _go_on(endpoint)
            except BaseException:
                self._initialised.discard(endpoint.url)  # it may have restarted
                await _give_up(client)
                raise

    async def still_serves(self, endpoint: Endpoint, version: str) -> bool:
        """Whether it was given ``version`` and has not restarted. Raises ``EndpointError``."""
        if self._given.get(endpoint.url) != version:
            return False
        return await endpoint.client.weight_version(ANSWER_TIMEOUT_S) == version

    async def stamp(self, endpoint: Endpoint, version: str, wanted: Callable[[], bool]) -> None:
        """Has ``endpoint`` serve what it was given under ``version``.

        Raises ``EndpointError``, ``Superseded``.
        """
        async with self._busy[endpoint.url]:
            if not wanted():
                raise Superseded
            given = self._given[endpoint.url]
            served = await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
            if served != given:
                raise EndpointError(endpoint.url, f"serves {served}, not {given}: has restarted")
            self._given[endpoint.url] = version
            await endpoint.client.set_weight_version(version, ANSWER_TIMEOUT_S)

    async def push_together(
        self,
        endpoints: Sequence[Endpoint],
        version: str,
        send: Callable[[Mapping[str, int]], Awaitable[None]],
    ) -> None:
        """Has ``send`` bring ``version`` to all ``endpoints``, which serve it then.

        Waits for: pushes before, the endpoints' running requests, ``send``. ``send`` is told in
        which start each is, by URL. After an error, ``EndpointError`` or what ``send`` raises, all
        that are up have been told to abandon the update and to go on with what they have.
        """
        async with contextlib.AsyncExitStack() as held:
            for endpoint in endpoints:
                await held.enter_async_context(self._busy[endpoint.url])
            try:
                await _each(endpoints, self._prepare)
                await send({endpoint.url: self._restarts[endpoint.url] for endpoint in endpoints})
                self._given.update((endpoint.url, version) for endpoint in endpoints)
                await _each(endpoints, _go_on)
            except BaseException:
                self._initialised.difference_update(endpoint.url for endpoint in endpoints)
                giving_up = (while_up(e, _give_up(e.client)) for e in endpoints)
                await asyncio.gather(*giving_up, return_exceptions=True)
                raise

    async def _prepare(self, endpoint: Endpoint) -> None:
        """It knows where the artefacts are and has nothing running."""
        if endpoint.url not in self._initialised:
            info = await self._announcer.init_info(endpoint.url)
            await endpoint.client.init_weight_transfer(info)
            self._initialised.add(endpoint.url)
        await endpoint.client.pause("wait")


async def _each(endpoints: Sequence[Endpoint], work: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Does ``work`` with all to its end; raises what went wrong with the first of them."""
    attempts = (while_up(endpoint, work(endpoint)) for endpoint in endpoints)
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _go_on(endpoint: Endpoint) -> None:
    """Serves its new weights."""
    await _reset_prefix_cache(endpoint.client)
    await endpoint.client.resume()


async def _open_update(client: EndpointClient) -> None:
    """A trainer that died in the middle of an update may have left it open."""
    try:
        await client.start_weight_update()
    except EndpointError as error:
        logger.warning("%s: gives up the weight update that is open and starts again", error)
        await _abandon(client)
        await client.start_weight_update()


async def _reset_prefix_cache(client: EndpointClient) -> None:
    if not await client.reset_prefix_cache():
        raise EndpointError(client.url, "did not reset its prefix cache, blocks are in use")


async def _abandon(client: EndpointClient) -> None:
    with contextlib.suppress(EndpointError):  # an error is the answer to be expected
        await client.abandon_weight_update()


async def _give_up(client: EndpointClient) -> None:
    """Leaves the endpoint able to take requests and further updates, as far as it answers."""
    with contextlib.suppress(EndpointError, TimeoutError):
        async with asyncio.timeout(GIVING_UP_S):
            await _abandon(client)
            await client.resume()


async def while_up(endpoint: Endpoint, work: Awaitable[T]) -> T:
    """The result of ``work``, which is given up when the pool finds ``endpoint`` down.

    An endpoint that hangs would hold the others up for the whole time-out of an update.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if endpoint.down is not None:
                raise EndpointUnavailable(endpoint.url, endpoint.down)
            await asyncio.wait([task], timeout=WATCH_INTERVAL_S)
        return task.result()
    finally:
        task.cancel()


async def still_answers(endpoint: Endpoint) -> bool:
    """Whether it is up after something has failed: then the failure was its answer."""
    try:
        await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
    except EndpointUnavailable:
        return False
    except EndpointError:
        return True
    return True
