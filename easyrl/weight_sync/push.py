"""Pushing weights to an endpoint, chunk by chunk while they are being written.

An endpoint that gives an update up keeps the layers that had come (vLLM's plugin) or refuses to
generate (embedded server); neither puts the old weights back. So before the first chunk it is given
a stamp that no request asks for, and only a proof (``reconcile.py``) gives it another. Once it has
all of the weights it stays paused until their bits are proved. That a proof follows is said with
each chunk: what comes through shared memory is not hashed on arrival then, and the endpoint itself
refuses to generate until it is told that the proof was right, whoever resumes it (``OwedProof``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.adapters import (
    load_adapter,
    loaded_adapters,
    send_adapter,
    unload_adapter,
)
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    NotAnswered,
    RequestRejected,
)
from easyrl.inference_client.pool.endpoint_pool import Endpoint
from easyrl.schema import WeightProof, other_run
from easyrl.weight_sync.broadcasting import WATCH_INTERVAL_S, Broadcaster, TensorTee
from easyrl.weight_sync.challenge import NONCE_BYTES
from easyrl.weight_sync.store import WeightStore
from easyrl.weight_sync.target import Target

logger = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0  # of a route that touches no weight
GIVING_UP_S = 10.0  # to leave an endpoint in order behind us
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # between attempts to leave it so


@dataclass(slots=True)
class Given:
    """What an endpoint was given; void if it shows another stamp, for then it has restarted."""

    stamp: str | None = None
    artifact: str | None = None  # loaded completely
    announced: bool = False  # it knows where artefacts are
    num_starts: int = 0  # how often it was new or had restarted


class WeightPusher:
    """Pushes to endpoints and remembers what each was given. On rank 0, in the pool's loop.

    Nothing here may run twice at a time for one endpoint. ``broadcaster``: for ``push_together``.
    ``proof_follows``: bits are proved between a push and ``resume``. ``names``: of the adapters
    that requests ask for.
    """

    def __init__(
        self,
        store: WeightStore,
        broadcaster: Broadcaster | None = None,
        *,
        proof_follows: bool = False,
        names: AdapterNames | None = None,
    ) -> None:
        self._store = store
        self._broadcaster = broadcaster
        self._proof_follows = proof_follows
        self._names = names or AdapterNames()
        self._given: defaultdict[str, Given] = defaultdict(Given)  # by URL
        self._paused: dict[str, Endpoint] = {}  # by URL: have all weights, and do not generate

    @property
    def paused(self) -> list[Endpoint]:
        """Those that were pushed to and neither resumed nor let go since."""
        return list(self._paused.values())

    async def has_restarted(self, endpoint: Endpoint) -> bool:
        """Whether it shows another stamp than it was given, or is new. Raises ``EndpointError``."""
        given = self._given[endpoint.url]
        if await endpoint.client.weight_version(ANSWER_TIMEOUT_S) == given.stamp:
            return False
        given.announced = False
        given.num_starts += 1
        return True

    async def stamp_of(self, endpoint: Endpoint, weights: Target) -> str | None:
        """Under which it has all of ``weights``; None if it has not, or has restarted."""
        given = self._given[endpoint.url]
        if given.artifact == weights.name:
            with contextlib.suppress(EndpointError):  # a push will tell why
                if await endpoint.client.weight_version(ANSWER_TIMEOUT_S) == given.stamp:
                    return given.stamp
        return None

    async def push(self, endpoint: Endpoint, weights: Target) -> None:
        """Loads all of ``weights`` into ``endpoint``, which stays paused until ``resume``.

        Consumes: its chunks. Waits for: the endpoint's running requests, the writer. Is unblocked
        by: the endpoint's answers. It has their ``unproven_stamp``. After an error
        (``EndpointError``, or a cancellation) it has been told to give the update up and to go on,
        with what is left and the same stamp; it refuses requests if that owes a proof.
        """
        client = endpoint.client
        try:
            await self._prepare(endpoint, weights.unproven_stamp)
            if weights.adapter is None:
                await self._send_model(client, weights)
            else:
                await self._send_adapter(client, weights)
            self._names.learn(endpoint.url, weights.model)
            self._given[endpoint.url].artifact = weights.name
            self._paused[endpoint.url] = endpoint
        except BaseException:
            self._given[endpoint.url].announced = False  # it may have restarted
            await _give_up(endpoint)
            raise

    async def push_together(
        self, endpoints: Sequence[Endpoint], weights: Target, tee: TensorTee
    ) -> None:
        """As ``push``, to all at once: a broadcast of what ``tee`` holds (``BroadcastFailed``)."""
        assert self._broadcaster is not None
        stamp = weights.unproven_stamp
        try:
            await _each(endpoints, lambda e: self._prepare(e, stamp))
            starts = {e.url: self._given[e.url].num_starts for e in endpoints}
            await self._broadcaster.send(endpoints, starts, stamp, tee)
            for endpoint in endpoints:
                self._given[endpoint.url].artifact = weights.name
                self._paused[endpoint.url] = endpoint
        except BaseException:
            for endpoint in endpoints:
                self._given[endpoint.url].announced = False
            giving_up = (while_up(e, _give_up(e)) for e in endpoints)
            await asyncio.gather(*giving_up, return_exceptions=True)
            raise

    async def resume(self, endpoint: Endpoint, proof: WeightProof | None) -> None:
        """Has ``endpoint`` generate with its new weights. Raises ``EndpointError``.

        ``proof``: its last of the model, also of one below an adapter; None: no bits were proved.
        No cached prefix is left, neither of the weights before nor of a push that failed: what was
        computed in between by half of either may have gone into an external cache, too. Blocks that
        are being moved there are in use for a moment.
        """
        client = endpoint.client
        if proof is None:
            await _reset_prefix_cache(client)
        else:
            accepting = client.accept_proof(bytes.fromhex(proof.nonce))
            await together(accepting, _reset_prefix_cache(client))
        await client.resume()
        self._paused.pop(endpoint.url, None)

    async def let_go(self, endpoint: Endpoint) -> None:
        """Has one that is given up go on, under a stamp that no request asks for.

        Requests that other processes have sent it end then, and go elsewhere: if it owes a proof
        it refuses them. Does nothing unless it is ``paused``, and takes ``GIVING_UP_S`` at most.
        """
        if endpoint.url not in self._paused:
            return
        try:
            async with asyncio.timeout(GIVING_UP_S):
                await _insist(endpoint, "resuming it", endpoint.client.resume)
            self._paused.pop(endpoint.url, None)
        except (EndpointError, TimeoutError) as error:
            logger.error("%s: stays paused for now: %r", endpoint.url, error)

    async def stamp(self, endpoint: Endpoint, version: str) -> None:
        """Has ``endpoint`` serve what it was given, and has proved, under ``version``.

        Raises ``EndpointError``, also if it has restarted. In the moment before the stamp it may
        have, unseen: ``check_start`` tells.
        """
        given, client = self._given[endpoint.url], endpoint.client
        shown = await client.weight_version(ANSWER_TIMEOUT_S)
        if shown != given.stamp:
            why = other_run(given.stamp, shown) or ": has restarted"
            raise EndpointError(endpoint.url, f"serves {shown}, not {given.stamp}{why}")
        given.stamp = version
        await client.set_weight_version(version, ANSWER_TIMEOUT_S)
        await self._unload_others(endpoint)

    async def check_start(self, endpoint: Endpoint) -> None:
        """Raises ``EndpointError`` if ``endpoint`` has restarted since it was pushed to: it refuses
        a proof then, since it knows of no trainer."""
        await endpoint.client.prove_weights(secrets.token_bytes(NONCE_BYTES), {})

    async def disown(self, endpoint: Endpoint, weights: Target) -> None:
        """``endpoint`` failed: it counts as restarted, and keeps no stamp that requests ask for.

        Raises ``EndpointUnavailable`` if it may keep it: nobody can reach what it serves, then.
        """
        client = endpoint.client
        self._given[endpoint.url] = Given(num_starts=self._given[endpoint.url].num_starts)

        async def take_back() -> None:
            if await client.weight_version(ANSWER_TIMEOUT_S) == weights.version:
                await client.set_weight_version(weights.unproven_stamp, ANSWER_TIMEOUT_S)

        await _insist(endpoint, f"taking the stamp {weights.version} back", take_back)

    async def _send_model(self, client: EndpointClient, weights: Target) -> None:
        await _open_update(client)
        async for chunks in weights.batches():
            described = [c.describe(proof_follows=self._proof_follows) for c in chunks]
            await client.update_weights({"artifact": weights.name, "chunks": described})
        await client.finish_weight_update(weights.unproven_stamp)

    async def _send_adapter(self, client: EndpointClient, weights: Target) -> None:
        """Its tensors into the workers, then under its name into their layers."""
        assert weights.adapter is not None
        name, rank, begins = weights.adapter.name, weights.adapter.rank, True
        with contextlib.suppress(RequestRejected):  # not known, unless this push was tried before
            await unload_adapter(client, name)
        async for chunks in weights.batches():
            described = [chunk.describe() for chunk in chunks]
            try:
                await send_adapter(client, name, rank, weights.name, described, begins=begins)
            except RequestRejected as error:  # it knows no such method, as the embedded server
                raise RequestRejected(
                    client.url,
                    f"takes no adapters: {error.reason}; use vLLM, or set weight_sync.lora=merged",
                ) from error
            begins = False
        await load_adapter(client, name)

    async def _unload_others(self, endpoint: Endpoint) -> None:
        """Adapters of versions before, also those of trainers that were killed: what they had
        running ended before the push.
        """
        if (served := self._names.of(endpoint.url)) is None:
            return
        with contextlib.suppress(EndpointError):  # it costs names there
            for name in await loaded_adapters(endpoint.client):
                if name != served:
                    await unload_adapter(endpoint.client, name)

    async def _prepare(self, endpoint: Endpoint, stamp: str) -> None:
        """It knows where the artefacts are, has nothing running, and no version any more."""
        client, given = endpoint.client, self._given[endpoint.url]
        if not given.announced:
            await client.init_weight_transfer(await self._store.init_info(endpoint.url))
            given.announced = True
        await client.pause("wait")  # what runs ends under the stamp that it began with
        given.artifact, given.stamp = None, stamp
        await client.set_weight_version(stamp, ANSWER_TIMEOUT_S)


async def together(*work: Awaitable[T]) -> list[T]:
    """The results of ``work``, all of which has ended then; raises what went wrong with the first
    that failed, in the order given."""
    results: list[T] = []
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


async def _each(endpoints: Sequence[Endpoint], work: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Does ``work`` with all to its end; raises what went wrong with the first of them."""
    await together(*(while_up(endpoint, work(endpoint)) for endpoint in endpoints))


async def _reset_prefix_cache(client: EndpointClient) -> None:
    for pause_s in (*RETRY_PAUSES_S, None):
        if await client.reset_prefix_cache():
            return
        if pause_s is None:
            raise EndpointError(client.url, "did not reset its prefix cache: blocks in use")
        await asyncio.sleep(pause_s)


async def _open_update(client: EndpointClient) -> None:
    """A trainer that died in the middle of an update may have left it open.

    Raises ``NotAnswered`` at once: who is silent has not said that one is open.
    """
    try:
        await client.start_weight_update()
    except NotAnswered:
        raise
    except EndpointError as error:
        logger.warning("%s: gives up the weight update that is open and starts again", error)
        try:
            await client.abandon_weight_update()
        except NotAnswered:
            raise
        except EndpointError:
            pass  # its connection often ends with the error
        await client.start_weight_update()


async def _give_up(endpoint: Endpoint) -> None:
    """Leaves the endpoint able to take requests and further updates, as far as it answers."""
    try:
        async with asyncio.timeout(GIVING_UP_S):
            with contextlib.suppress(EndpointError):
                await endpoint.client.abandon_weight_update()
            await _insist(endpoint, "resuming it", endpoint.client.resume)
    except (EndpointError, TimeoutError) as error:
        logger.error("%s: may stay paused until the next push: %r", endpoint.url, error)


async def _insist(endpoint: Endpoint, what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Does ``work``, again if it fails. Raises ``EndpointUnavailable`` if it keeps failing."""
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            return await work()
        except EndpointError as error:
            logger.warning("%s: %s failed: %s", endpoint.url, what, error.reason)
            if pause_s is None:
                raise EndpointUnavailable(endpoint.url, f"{what} failed: {error.reason}") from error
            await asyncio.sleep(pause_s)


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
    """Whether it is up after a failure, which then was its answer."""
    try:
        await endpoint.client.weight_version(ANSWER_TIMEOUT_S)
    except EndpointError as error:
        return not isinstance(error, EndpointUnavailable)
    return True
