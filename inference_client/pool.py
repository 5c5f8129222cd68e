"""The endpoints together: spreads requests, retries elsewhere, knows who confirmed which version.

Everything here runs on one asyncio loop (the producer's). Bodies of responses pass through as bytes
and are decoded by ``offload`` in a worker process (DESIGN §3).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.client import EndpointClient, parse_generate_response
from easyrl.inference_client.endpoint import Endpoint
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointError,
    EndpointUnavailable,
    MalformedResponse,
    NoEndpointError,
    RequestRejected,
    WrongVersion,
)
from easyrl.inference_client.waiting_line import Need, Waiting, WaitingLine
from easyrl.schema import Completion

__all__ = ["Endpoint", "EndpointPool", "NoEndpointError", "PoolCounters"]

log = logging.getLogger(__name__)

Offload = Callable[..., Awaitable[Any]]  # offload(function, *args) runs it in a worker process
Repair = Callable[[Endpoint], Awaitable[None]]

MAX_BACK_OFF_S = 30.0
HEALTH_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 2.0  # below vLLM's 5 s, so that no request is sent into a connection being closed
SPARE_OPEN_FILES = 256  # for everything that is not a connection to an endpoint


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """Since the start."""

    num_requests: int  # sent, retries included
    num_retries: int
    num_failures: dict[str, int]  # by URL


class EndpointPool:
    """All inference endpoints.

    Args:
        config: URLs, limits and time-outs.
        offload: runs a function in a worker process, as ``WorkerPool.call`` does.
        num_shares: processes that share the endpoints (trainer ranks); ``max_inflight`` is divided
            by it.
        update_timeout_s: for each answer to a request that touches weights.
        repair: called when an endpoint lost its confirmed version (it restarted, or was given other
            weights). It brings the weights back and calls ``confirm``, or ``exclude``; requests
            wait for it. Without it the endpoint stays unconfirmed until the next ``confirm``.
        back_off_s: how long an endpoint is set aside after a first failure; doubles up to 30 s.
    """

    def __init__(
        self,
        config: InferenceConfig,
        offload: Offload,
        *,
        num_shares: int = 1,
        update_timeout_s: float = 600.0,
        repair: Repair | None = None,
        back_off_s: float = 0.5,
    ) -> None:
        self._config = config
        self._offload = offload
        self._update_timeout_s = update_timeout_s
        self._repair = repair
        self._back_off_s = back_off_s
        self._max_inflight = max(1, config.max_inflight // num_shares)
        self._api_key = _read_api_key(config)
        self._line = WaitingLine()
        self._order = itertools.count()
        self._background: set[asyncio.Task] = set()
        self._session: aiohttp.ClientSession | None = None
        self._num_retries = 0
        self.endpoints: list[Endpoint] = []

    async def start(self) -> None:
        """Opens the session; call it in the loop that will send the requests."""
        assert self._session is None, "started twice"
        _allow_open_files(len(self._config.endpoints) * self._max_inflight + SPARE_OPEN_FILES)
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector)
        self.endpoints = [
            Endpoint(
                EndpointClient(
                    url, self._session, api_key=self._api_key, timeout_s=self._update_timeout_s
                ),
                self._max_inflight,
            )
            for url in self._config.endpoints
        ]

    async def close(self) -> None:
        """Ends background work and closes all connections. Safe to call twice."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def wait_until_healthy(self) -> None:
        """Waits until every endpoint is healthy and lists a model.

        Raises ``NoEndpointError`` with what each missing one answered after ``startup_timeout_s``,
        and ``RequestRejected`` at once if one refuses us (a wrong API key).
        """
        answers: dict[str, str] = {}
        limit_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for endpoint in self.endpoints:
                    tasks.create_task(self._until_healthy(endpoint, answers))
        except TimeoutError:
            missing = [endpoint.url for endpoint in self.endpoints if endpoint.served is None]
            lines = "".join(f"\n  {url}: {answers.get(url, 'no answer yet')}" for url in missing)
            raise NoEndpointError(
                f"{len(missing)} of {len(self.endpoints)} endpoints are not up after {limit_s:g} s "
                f"(inference.startup_timeout_s):{lines}"
            ) from None
        except ExceptionGroup as refused:
            raise refused.exceptions[0] from None

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        version: str | None = None,
    ) -> Completion:
        """One response to the prompt, int32 [P].

        Consumes: a place at the endpoint with the least outstanding work among those that confirmed
        ``version`` (any, if None). Waits for: such a place, in order of asking, and the response.
        Is unblocked by: an answer, a recovered endpoint, ``confirm``. Produces: a completion of
        which every token is stamped with ``version``.

        What fails is sent to another endpoint, with the same seed, ``max_retries`` times. Raises
        ``AttemptsFailed``, ``NoEndpointError``, or ``RequestRejected``. Cancelling closes the
        connection, which aborts the request on the server.
        """
        num_tokens = len(prompt_token_ids) + sampling.max_tokens
        order = next(self._order)
        attempts: list[EndpointError] = []
        avoid: Endpoint | None = None
        while True:
            endpoint = await self._place(order, Need(version, avoid), num_tokens)
            try:
                return await self._attempt(
                    endpoint, prompt_token_ids, sampling, seed, version, num_tokens
                )
            except RequestRejected:
                raise
            except EndpointError as error:
                attempts.append(error)
                if len(attempts) > self._config.max_retries:
                    raise AttemptsFailed(attempts) from error
                self._num_retries += 1
                avoid = endpoint

    def confirm(self, endpoint: Endpoint, version: str) -> None:
        """``endpoint`` has proved that it serves ``version`` (DESIGN §2.5)."""
        endpoint.confirmed_version = version
        endpoint.lost_confirmation = None
        endpoint.down = None
        self._dispatch()

    def exclude(self, endpoint: Endpoint, reason: str) -> None:
        """``endpoint`` gets no more requests."""
        log.warning("%s is excluded: %s", endpoint.url, reason)
        endpoint.excluded = reason
        self._dispatch()

    def set_repair(self, repair: Repair) -> None:
        """``repair`` as in the constructor, for one that needs the pool itself."""
        self._repair = repair

    async def check_version(self, endpoint: Endpoint) -> None:
        """Asks which version it serves; if not the confirmed one, it is repaired."""
        expected = endpoint.confirmed_version
        if expected is None:
            return
        try:
            served = await endpoint.client.weight_version(PROBE_TIMEOUT_S)
        except EndpointError:
            return  # requests will notice
        if served != expected:
            self._lose_confirmation(endpoint, expected, f"serves {served}")

    def withdraw_confirmations(self) -> None:
        """The weights are about to move: no endpoint serves a known version."""
        for endpoint in self.endpoints:
            endpoint.confirmed_version = None
            endpoint.lost_confirmation = None
        self._dispatch()

    def idle_s(self) -> float:
        """Seconds with nothing in flight since the start, mean over the endpoints."""
        return sum(endpoint.idle_s() for endpoint in self.endpoints) / len(self.endpoints)

    def counters(self) -> PoolCounters:
        return PoolCounters(
            num_requests=sum(endpoint.num_requests for endpoint in self.endpoints),
            num_retries=self._num_retries,
            num_failures={endpoint.url: endpoint.num_failures for endpoint in self.endpoints},
        )

    async def _until_healthy(self, endpoint: Endpoint, answers: dict[str, str]) -> None:
        while True:
            try:
                await endpoint.client.health()
                endpoint.served = await endpoint.client.served_model()
                return
            except RequestRejected:
                raise
            except EndpointError as error:
                answers[endpoint.url] = error.reason
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _place(self, order: int, need: Need, num_tokens: int) -> Endpoint:
        """A place at an endpoint, counted as in flight there. Raises ``NoEndpointError``."""
        place: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._line.add(Waiting(order, need, num_tokens, place))
        self._dispatch()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release(place.result(), num_tokens)  # given in the moment of the cancellation
            raise

    async def _attempt(
        self,
        endpoint: Endpoint,
        prompt_token_ids: np.ndarray,
        sampling: SamplingConfig,
        seed: int,
        version: str | None,
        num_tokens: int,
    ) -> Completion:
        try:
            try:
                send = endpoint.client.generate(prompt_token_ids, sampling, seed)
                body = await self._while_progressing(endpoint, send)
            except EndpointUnavailable as error:
                self._set_aside(endpoint, error)  # before its place is given to somebody else
                raise
        finally:
            self._release(endpoint, num_tokens)
        try:
            completions = await self._offload(
                parse_generate_response, body, endpoint.url, len(prompt_token_ids)
            )
            if len(completions) != 1:
                raise MalformedResponse(endpoint.url, f"{len(completions)} choices, asked for 1")
        except EndpointError as error:
            self._set_aside(endpoint, error)
            raise
        endpoint.num_consecutive_failures = 0
        completion: Completion = completions[0]
        stamped = {span.version for span in completion.version_spans}
        if version is not None and stamped != {version}:
            wrong = WrongVersion(endpoint.url, f"tokens of {sorted(stamped)}, asked for {version}")
            endpoint.num_failures += 1
            self._lose_confirmation(endpoint, version, wrong.reason)
            raise wrong
        return completion

    async def _while_progressing(
        self, endpoint: Endpoint, send: Coroutine[Any, Any, bytes]
    ) -> bytes:
        """Gives up when the endpoint has answered nothing at all for ``progress_timeout_s``.

        A long response of a busy endpoint is not a failure: timing requests one by one would favour
        short responses (DESIGN §2.8).
        """
        limit_s = self._config.progress_timeout_s
        sent_s = time.monotonic()
        request = asyncio.ensure_future(send)
        try:
            while not request.done():
                quiet_s = time.monotonic() - max(sent_s, endpoint.last_answer_s)
                if quiet_s >= limit_s:
                    reason = f"no answer for {limit_s:g} s (inference.progress_timeout_s)"
                    raise EndpointUnavailable(endpoint.url, reason)
                await asyncio.wait([request], timeout=limit_s - quiet_s)
            body = request.result()
            endpoint.last_answer_s = time.monotonic()
            return body
        finally:
            request.cancel()

    def _release(self, endpoint: Endpoint, num_tokens: int) -> None:
        endpoint.end(num_tokens)
        self._dispatch()

    def _dispatch(self) -> None:
        """Gives free places to those who wait, oldest first; ends waiting that became hopeless."""
        while (found := self._line.pop(self._pick)) is not None:
            waiting, endpoint = found
            endpoint.begin(waiting.num_tokens)
            waiting.place.set_result(endpoint)
        for need in self._line.needs():
            if not any(self._may_become_ready(endpoint, need) for endpoint in self.endpoints):
                self._line.fail(need, self._no_endpoint(need))

    def _pick(self, need: Need) -> Endpoint | None:
        """The ready endpoint with the least work; the one to avoid only if no other is eligible."""
        eligible = [endpoint for endpoint in self.endpoints if endpoint.eligible(need.version)]
        others = [endpoint for endpoint in eligible if endpoint is not need.avoid] or eligible
        ready = [endpoint for endpoint in others if endpoint.ready(need.version)]
        return min(ready, key=lambda e: (e.outstanding_tokens, e.num_requests), default=None)

    def _may_become_ready(self, endpoint: Endpoint, need: Need) -> bool:
        if endpoint.excluded is not None:
            return False
        if endpoint.repairing:
            return True
        if not endpoint.eligible(need.version):
            return False
        down_s = time.monotonic() - endpoint.down_since_s
        return endpoint.down is None or down_s < self._config.startup_timeout_s

    def _no_endpoint(self, need: Need) -> NoEndpointError:
        lines = "".join(f"\n  {e.url}: {e.status(need.version)}" for e in self.endpoints)
        what = "" if need.version is None else f" for version {need.version}"
        return NoEndpointError(f"no usable endpoint{what}:{lines}")

    def _set_aside(self, endpoint: Endpoint, error: EndpointError) -> None:
        """Sends it nothing for a while, then asks it how it is."""
        endpoint.num_failures += 1
        if endpoint.down is not None or endpoint.excluded is not None:
            return
        log.warning("%s is set aside: %s", endpoint.url, error.reason)
        endpoint.down = error.reason
        endpoint.down_since_s = time.monotonic()
        endpoint.num_consecutive_failures += 1
        self._start(self._recover(endpoint))

    async def _recover(self, endpoint: Endpoint) -> None:
        """Takes an endpoint back once it answers; a restarted one lost its weights."""
        num_failures = endpoint.num_consecutive_failures
        while True:
            await asyncio.sleep(_back_off(self._back_off_s, num_failures))
            if endpoint.down is None or endpoint.excluded is not None:
                return
            expected = endpoint.confirmed_version
            try:
                if expected is None:
                    await endpoint.client.health()
                    served = None
                else:
                    served = await endpoint.client.weight_version(PROBE_TIMEOUT_S)
                break
            except EndpointError as error:
                endpoint.down = error.reason
                num_failures += 1
                self._dispatch()
        endpoint.down = None
        log.warning("%s answers again", endpoint.url)
        if expected is not None and served != expected:
            self._lose_confirmation(endpoint, expected, f"serves {served} after an interruption")
        self._dispatch()

    def _lose_confirmation(self, endpoint: Endpoint, version: str, reason: str) -> None:
        if endpoint.confirmed_version != version:
            return  # known, or the weights have moved meanwhile
        log.warning("%s no longer serves %s: %s", endpoint.url, version, reason)
        endpoint.confirmed_version = None
        endpoint.lost_confirmation = reason
        if self._repair is not None and not endpoint.repairing:
            endpoint.repairing = True
            self._start(self._run_repair(endpoint, self._repair))
        self._dispatch()

    async def _run_repair(self, endpoint: Endpoint, repair: Repair) -> None:
        try:
            await repair(endpoint)
        except EndpointError as error:
            self.exclude(endpoint, f"could not be given its weights back: {error.reason}")
        finally:
            endpoint.repairing = False
            self._dispatch()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _back_off(first_s: float, num_failures: int) -> float:
    return min(first_s * 2 ** min(num_failures - 1, 16), MAX_BACK_OFF_S)


def _read_api_key(config: InferenceConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ValueError(
            f"inference.api_key_env: the environment variable {config.api_key_env} is not set; "
            "export it with the endpoints' key, or remove inference.api_key_env"
        )
    return key


def _allow_open_files(num_files: int) -> None:
    """Raises the soft limit, by default 1024; each request in flight is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    allowed = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < num_files:
        log.warning(
            "the endpoints' limits together (inference.max_inflight) need %d open files, the "
            "system allows %d (ulimit -Hn)",
            num_files,
            allowed,
        )
