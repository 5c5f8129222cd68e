"""The endpoints of a run: some join, some leave, and what is known of all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from easyrl.config import InferenceConfig, endpoint_url
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.pool.dispatch import Dispatcher
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.health import Admission, Health, Repair
from easyrl.inference_client.pool.idle_time import IdleTime
from easyrl.inference_client.pool.membership import EndpointState
from easyrl.inference_client.pool.outage import OutageWatch
from easyrl.inference_client.pool.progress import TokenCounter

KEEP_ALIVE_S = 2.0  # below vLLM's 5 s, so that no request is sent into a connection being closed


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """Since the start, endpoints that have left included."""

    num_requests: int  # sent, retries included
    num_retries: int
    num_failures: dict[str, int]  # by URL


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What every endpoint is asked with."""

    api_key: str | None
    max_inflight: int  # requests of this process at a time
    update_timeout_s: float
    back_off_s: float
    probe_timeout_s: float | None


class Fleet:
    """Endpoints that come and go, who goes to which, and how they are.

    Everything but reading happens on the loop in which ``start`` was awaited.
    """

    def __init__(
        self, config: InferenceConfig, settings: ClientSettings, urls: Sequence[str]
    ) -> None:
        self._config = config
        self._settings = settings
        self._first_urls = list(urls)
        self.endpoints: list[Endpoint] = []  # replaced, never changed: other threads read it
        self._dispatcher = Dispatcher(self._somebody_is_stuck)
        self._outage = OutageWatch(self._dispatcher, config.max_outage_s)
        self._session: aiohttp.ClientSession | None = None  # for everything but generations
        self._repair: Repair | None = None
        self._context_len: int | None = None  # the smallest that an endpoint serves
        self._idle_time = IdleTime()
        self._num_retries = 0
        self._left_requests = 0  # of endpoints that have left
        self._left_failures: dict[str, int] = {}

    async def start(self) -> None:
        """Begins to watch the endpoints."""
        assert self._session is None, "started twice"
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector)
        self._health = Health(
            self._config,
            TokenCounter(self._session),
            self._changed,
            back_off_s=self._settings.back_off_s,
            probe_timeout_s=self._settings.probe_timeout_s,
        )
        self._health.repair = self._repair
        for url in self._first_urls:
            self.add(url)

    async def close(self) -> None:
        """Ends background work and closes all connections. Safe to call twice."""
        if self._session is not None:
            await self._outage.close()
            await self._health.close()
            await self._session.close()

    # ---- who belongs to it -----------------------------------------------------------------------

    def add(self, url: str) -> Endpoint:
        """Takes in the endpoint at ``url``: once it answers it is repaired, then used.

        Raises ``ValueError`` if it is no URL, or there already.
        """
        assert self._session is not None, "start first"
        url = endpoint_url(url)
        there = self._find(url)
        if there is not None:
            if not there.leaving:
                raise ValueError(f"{url} is an endpoint already")
            self._forget(there)  # what it has in flight finishes all the same
        client = EndpointClient(
            url,
            self._session,
            api_key=self._settings.api_key,
            timeout_s=self._settings.update_timeout_s,
        )
        endpoint = Endpoint(client, self._settings.max_inflight)
        endpoint.down = "no answer yet"
        self._set_endpoints([*self.endpoints, endpoint])
        self._health.watch(endpoint)
        return endpoint

    def remove(self, url: str) -> None:
        """``url`` gets nothing new; when what it has in flight has finished, it is forgotten.

        Raises ``ValueError`` if it is not there.
        """
        url = endpoint_url(url)
        endpoint = self._find(url)
        if endpoint is None:
            raise ValueError(f"{url} is no endpoint of this run")
        endpoint.leaving = True
        self._changed(endpoint)
        self._forget_if_done(endpoint)

    def _forget_if_done(self, endpoint: Endpoint) -> None:
        """Forgets a removed endpoint that has nothing in flight."""
        if endpoint.leaving and endpoint.num_inflight == 0 and not endpoint.left:
            self._forget(endpoint)

    # ---- what others find out --------------------------------------------------------------------

    def confirm(self, endpoint: Endpoint, version: str) -> None:
        """``endpoint`` has proved that it serves ``version`` (docs/endpoints.md), the current one.

        Each call is a good proof and gives ``endpoint.proof`` the next number.
        """
        self._health.confirm(endpoint, version)

    def withdraw_confirmations(self) -> None:
        """The weights are about to move: no endpoint serves a known version."""
        self._health.current_version = None
        for endpoint in self.endpoints:
            endpoint.confirmed_version = None
            endpoint.lost_confirmation = None
        for version in self._dispatcher.waiting_versions():
            if version is not None:  # would wait for what never comes back
                self._dispatcher.fail(version, self._outage.no_endpoint(version))

    def quarantine(self, endpoint: Endpoint, reason: str) -> None:
        """``endpoint`` failed a proof: it is not used until ``confirm``.

        Its requests in flight are sent to the others.
        """
        self._health.quarantine(endpoint, reason)

    def exclude(self, endpoint: Endpoint, reason: str) -> None:
        """``endpoint`` failed its proof and gets no more requests until it is removed and added."""
        self._health.exclude(endpoint, reason)

    def set_aside(self, endpoint: Endpoint, error: EndpointError) -> None:
        """``endpoint`` was found not answering: it is down until it does again."""
        self._health.set_aside(endpoint, error)

    def set_repair(self, repair: Repair) -> None:
        """What brings an endpoint that is up to the current version, and calls ``confirm``.

        If it raises ``EndpointUnavailable`` the endpoint is down and it is tried again later; any
        other ``EndpointError`` excludes the endpoint.
        """
        self._repair = repair
        if self._session is not None:
            self._health.repair = repair

    def set_admission(self, admission: Admission) -> None:
        """Asked of each endpoint that answers; one that it gives a reason for is excluded."""
        assert self._session is not None, "start first"
        self._health.admission = admission

    async def until_live(self, timeout_s: float) -> list[Endpoint]:
        """The endpoints that are up, as soon as there is one.

        Raises ``Outage`` after ``timeout_s``, ``NoEndpointError`` if all are excluded.
        """
        return await self._outage.until_live(timeout_s)

    @property
    def in_outage(self) -> bool:
        """Nobody is up, or nobody can answer those who wait; it ends after ``max_outage_s``."""
        return self._outage.is_on or not any(endpoint.is_up for endpoint in self.endpoints)

    # ---- figures ---------------------------------------------------------------------------------

    def states(self) -> list[EndpointState]:
        """Each endpoint as ``easyrl endpoints list`` shows it."""
        current = self._health.current_version
        return [
            EndpointState(
                url=endpoint.url,
                state=endpoint.status(current),
                confirmed_version=endpoint.confirmed_version,
                in_flight=endpoint.num_inflight,
                failures=endpoint.num_failures,
                served=endpoint.num_completed,
            )
            for endpoint in self.endpoints
        ]

    def counters(self) -> PoolCounters:
        endpoints = self.endpoints
        failures = dict(self._left_failures)
        for endpoint in endpoints:
            failures[endpoint.url] = failures.get(endpoint.url, 0) + endpoint.num_failures
        num_requests = self._left_requests + sum(e.num_requests for e in endpoints)
        return PoolCounters(num_requests, self._num_retries, failures)

    def idle_s(self) -> float:
        """Seconds with nothing in flight since the start, mean over the endpoints."""
        return self._idle_time.mean_s(self.endpoints)

    def _find(self, url: str) -> Endpoint | None:
        return next((endpoint for endpoint in self.endpoints if endpoint.url == url), None)

    def _forget(self, endpoint: Endpoint) -> None:
        endpoint.left = True
        self._left_requests += endpoint.num_requests
        before = self._left_failures.get(endpoint.url, 0)
        self._left_failures[endpoint.url] = before + endpoint.num_failures
        self._health.forget(endpoint)
        self._set_endpoints([other for other in self.endpoints if other is not endpoint])
        self._outage.look()

    def _set_endpoints(self, endpoints: list[Endpoint]) -> None:
        self.endpoints = endpoints
        self._dispatcher.endpoints = endpoints
        self._context_len = _smallest_context(endpoints)

    def _changed(self, endpoint: Endpoint) -> None:
        """``endpoint`` has become usable, or unusable."""
        self._context_len = _smallest_context(self.endpoints)
        self._dispatcher.changed(endpoint)
        self._outage.look()

    def _somebody_is_stuck(self) -> None:
        self._outage.look()


def _smallest_context(endpoints: Sequence[Endpoint]) -> int | None:
    """Of all, also those that are down: which of them answers must not decide where it ends."""
    lengths = [e.served.max_model_len for e in endpoints if e.served and e.excluded is None]
    return min((length for length in lengths if length is not None), default=None)
