"""The endpoints of a run: who joins and leaves, who is up, and which weights each has proved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import aiohttp

from easyrl.config import InferenceConfig, endpoint_url
from easyrl.inference_client.api_keys import ApiKeys, read_variable
from easyrl.inference_client.client import KEEP_ALIVE_S, EndpointClient, Fetch
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    MalformedResponse,
    NoEndpointError,
    NoSuchModel,
    Outage,
    RequestRejected,
)
from easyrl.inference_client.pool.canary_prompt import CanaryPrompt
from easyrl.inference_client.pool.dispatch import Dispatcher, status_lines, wait_out
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.inflight_limits import InflightLimits
from easyrl.schema import other_run

log = logging.getLogger(__name__)

Repair = Callable[[Endpoint], Awaitable[None]]
Admission = Callable[[Endpoint], str | None]  # why it may not take part

POLL_S = 0.05
SAY_AFTER_S = 2.0  # without an endpoint that is up at the start
SAY_EVERY_S = 30.0
MAX_BACK_OFF_S = 30.0
MAX_PROBE_TIMEOUT_S = 10.0
MIN_PROBE_TIMEOUT_S = 1.0
NUM_UNANSWERED = 2  # probes in a row that make a hang
SMALLEST_CONTEXT = 2  # tokens: one of a prompt, one of its response
SLOWEST_S_PER_TOKEN = 1.0  # expected of a response before any has come


class Fleet:
    """Endpoints that come and go, each asked every ``health_interval_s`` what it serves.

    It is up or *down* by its answers, and repaired if it is up without the current weights. A busy
    endpoint is never timed out because it is slow: it has to leave probes unanswered, to make no
    progress at all for ``progress_timeout_s``, or to count tokens for far longer than its requests
    can take and answer none of them.

    Everything but reading happens on the loop in which ``start`` was awaited.
    """

    def __init__(
        self,
        config: InferenceConfig,
        fetch: Fetch,
        urls: Sequence[str],
        api_keys: ApiKeys,
        num_shares: int,
        update_timeout_s: float,
    ) -> None:
        self.endpoints: list[Endpoint] = []  # replaced, never changed: other threads read it
        self._config = config
        self._first_urls = list(urls)
        self.api_keys = api_keys
        self.limits = InflightLimits(config.max_inflight, num_shares)
        self._update_timeout_s = update_timeout_s
        self.back_off_s = 0.5  # set aside for so long after a first failure; doubles up to 30 s
        self._interval_s = min(config.health_interval_s, config.progress_timeout_s / 4)
        twice_s = max(MIN_PROBE_TIMEOUT_S, 2 * config.health_interval_s)
        self.probe_timeout_s = min(MAX_PROBE_TIMEOUT_S, twice_s)
        self._dispatcher = Dispatcher(config.max_outage_s)
        self.canary = CanaryPrompt(fetch, config.progress_timeout_s)
        self._session: aiohttp.ClientSession | None = None  # for everything but generations
        self._current_version: str | None = None  # last confirmed; None while the weights move
        self._num_proofs: Counter[str] = Counter()  # good ones, by URL: it may leave and come back
        self._repair: Repair | None = None
        self._admission: Admission | None = None
        self._timers: dict[Endpoint, asyncio.TimerHandle] = {}  # of the next look at each
        self._background: set[asyncio.Task] = set()
        self._closed = False

    async def start(self) -> None:
        """Begins to watch the endpoints."""
        assert self._session is None, "started twice"
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
        # no cookies: what one endpoint sets would go to others on its host
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar()
        )
        for url in self._first_urls:
            self.add(url)

    async def wait_until_healthy(
        self,
        grace_s: float = 5.0,
        *,
        own: Collection[str] = (),
        given_up: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Waits until an endpoint is healthy and lists a model, and ``grace_s`` for the others.

        Soon says what it waits for, and the remedy, unless all are among the URLs ``own``, of
        servers that the run has just started: where nobody listens may be a mistake, or a server
        that still loads its model.

        Raises ``NoEndpointError`` with what each answered if there is none after
        ``startup_timeout_s``, or as soon as all are among the URLs ``given_up``, and
        ``RequestRejected`` or ``MalformedResponse`` at once if all others refuse us (a wrong API
        key) or are no inference servers (a URL that redirects).
        """
        limit_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._until_one_is_up(own, given_up)
        except TimeoutError:
            raise NoEndpointError(
                f"no endpoint is up after {limit_s:g} s (inference.startup_timeout_s):"
                + status_lines(self.endpoints)
            ) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._awaited(given_up):
                    await asyncio.sleep(POLL_S)
        if late := [endpoint for endpoint in self.endpoints if not endpoint.is_up]:
            log.warning("going on without endpoints that are not up yet:%s", status_lines(late))

    async def _until_one_is_up(
        self, own: Collection[str], given_up: Callable[[], Collection[str]]
    ) -> None:
        say_at = time.monotonic() + SAY_AFTER_S
        while not any(endpoint.is_up for endpoint in self.endpoints):
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_EVERY_S
                if any(endpoint.url not in own for endpoint in self._awaited(given_up)):
                    log.warning(
                        "inference.endpoints: none is up yet; waiting for one for up to %g s "
                        "(inference.startup_timeout_s):%s\n(start the servers, or correct their "
                        "URLs, if they are not just loading)",
                        self._config.startup_timeout_s,
                        status_lines(self.endpoints),
                    )
            if self.endpoints and not self._awaited(given_up):
                refusals = (e.refused for e in self.endpoints if e.refused is not None)
                raise next(refusals, None) or NoEndpointError(
                    "no endpoint is up, and none will be:" + status_lines(self.endpoints)
                )
            await asyncio.sleep(POLL_S)

    def _awaited(self, given_up: Callable[[], Collection[str]]) -> list[Endpoint]:
        """The endpoints that are not up yet, and may still be."""
        gone = given_up()
        return [e for e in self.endpoints if not (e.is_up or e.refused or e.url in gone)]

    async def close(self) -> None:
        """Ends background work and closes all connections. Safe to call twice."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.canary.close()
        await self._dispatcher.close()
        if self._session is not None:
            await self._session.close()

    # ---- who belongs to it -----------------------------------------------------------------------

    def add(self, url: str, api_key_env: str | None = None) -> Endpoint:
        """Takes in the endpoint at ``url``: once it answers it is repaired, then used.

        ``api_key_env`` names a variable of this process's environment that holds its key, if it has
        one of its own. Raises ``ValueError`` if it is not set, if ``url`` is no URL, or there
        already.
        """
        assert self._session is not None, "start first"
        url = endpoint_url(url)
        there = self._find(url)
        if there is not None:
            if not there.leaving:
                raise ValueError(f"{url} is an endpoint already")
        if api_key_env is not None:
            self.api_keys.learn(url, read_variable(api_key_env, "--api-key-env"))
        if there is not None:
            self._forget(there)  # what it has in flight finishes all the same
        client = EndpointClient(
            url, self._session, api_key=self.api_keys.of(url), timeout_s=self._update_timeout_s
        )
        endpoint = Endpoint(client, self.limits.at_first)
        endpoint.down = "no answer yet"
        self.endpoints = self._dispatcher.endpoints = [*self.endpoints, endpoint]
        self._look_in(endpoint, 0.0)
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
        self._dispatcher.changed(endpoint)
        self._forget_if_done(endpoint)

    def _forget_if_done(self, endpoint: Endpoint) -> None:
        if endpoint.leaving and endpoint.num_inflight == 0 and endpoint in self.endpoints:
            self._forget(endpoint)

    def _find(self, url: str) -> Endpoint | None:
        return next((endpoint for endpoint in self.endpoints if endpoint.url == url), None)

    def _forget(self, endpoint: Endpoint) -> None:
        if (timer := self._timers.pop(endpoint, None)) is not None:
            timer.cancel()
        self.limits.forget(endpoint)
        others = [other for other in self.endpoints if other is not endpoint]
        self.endpoints = self._dispatcher.endpoints = others
        self._dispatcher.look_for_outage()

    # ---- what others find out --------------------------------------------------------------------

    def confirm(self, endpoint: Endpoint, version: str, *, cleared: bool = True) -> None:
        """``endpoint`` has proved that it serves ``version`` (docs/endpoints.md), the current one.

        Each call is a good proof and gives ``endpoint.proof`` the next number. Without ``cleared``
        it is sent requests, and what it answers is held back until ``clear``; a ``quarantine``
        instead has them answered elsewhere.
        """
        if cleared:
            endpoint.cleared.set()
        else:
            endpoint.cleared.clear()
        self._current_version = version
        self._num_proofs[endpoint.url] += 1
        endpoint.proof = self._num_proofs[endpoint.url]
        endpoint.confirmed_version = version
        endpoint.lost_confirmation = None
        endpoint.down = None
        endpoint.num_unanswered = endpoint.num_consecutive_failures = 0
        endpoint.last_usable_s = endpoint.confirmed_s = time.monotonic()
        self._dispatcher.changed(endpoint)

    def clear(self, endpoint: Endpoint) -> None:
        """``endpoint``, confirmed before, has proved all it had to: its answers count."""
        endpoint.cleared.set()

    def withdraw_confirmations(self) -> None:
        """The weights are about to move: no endpoint serves a known version."""
        self._current_version = None
        self.limits.end_batch()
        for endpoint in self.endpoints:
            endpoint.confirmed_version = None
            endpoint.lost_confirmation = None
            endpoint.num_false_refusals = 0
        for need in self._dispatcher.waiting_needs():
            if need.version is not None:  # would wait for what never comes back
                self._dispatcher.fail(need, self._dispatcher.no_endpoint(need))

    def set_aside(self, endpoint: Endpoint, error: EndpointError) -> None:
        """Sends it nothing for a while, longer each time in a row, then asks it how it is."""
        if endpoint.down is None:
            endpoint.num_consecutive_failures += 1
        self._set_down(endpoint, error, endpoint.num_consecutive_failures)

    def _set_down(self, endpoint: Endpoint, error: EndpointError, num_in_a_row: int = 1) -> None:
        endpoint.num_failures += 1
        if endpoint.down is not None or endpoint.excluded is not None:
            return
        log.warning("%s is set aside: %s", endpoint.url, error.reason)
        endpoint.down = error.reason
        if self._repair is not None:  # what comes back may have restarted
            endpoint.confirmed_version = None
            endpoint.lost_confirmation = f"was down: {error.reason}"
        self._look_in(endpoint, _back_off(self.back_off_s, num_in_a_row))
        self._dispatcher.changed(endpoint)

    def _lose_confirmation(self, endpoint: Endpoint, version: str, reason: str) -> None:
        """It was seen to serve something else than ``version``, which it had confirmed."""
        if endpoint.confirmed_version != version:
            return  # known, or the weights have moved meanwhile
        log.warning("%s no longer serves %s: %s", endpoint.url, version, reason)
        endpoint.confirmed_version = None
        endpoint.lost_confirmation = reason
        self._start_repair(endpoint)
        self._dispatcher.changed(endpoint)

    def quarantine(self, endpoint: Endpoint, reason: str) -> None:
        """``endpoint`` failed a proof: not used until ``confirm``, its requests go elsewhere."""
        endpoint.confirmed_version = None
        endpoint.lost_confirmation = reason
        endpoint.abort_attempts(EndpointUnavailable(endpoint.url, f"quarantined: {reason}"))
        self._dispatcher.changed(endpoint)

    def exclude(self, endpoint: Endpoint, reason: str) -> None:
        """``endpoint`` gets no more requests until it is removed and added."""
        log.warning("%s is excluded: %s", endpoint.url, reason)
        endpoint.excluded = reason
        endpoint.abort_attempts(EndpointUnavailable(endpoint.url, f"excluded: {reason}"))
        self._dispatcher.changed(endpoint)

    def set_admission(self, admission: Admission) -> None:
        """Asked of each endpoint that answers; one that it gives a reason for is excluded."""
        self._admission = admission

    async def until_live(self, timeout_s: float) -> list[Endpoint]:
        """The endpoints that are up, as soon as there is one.

        Raises ``Outage`` after ``timeout_s``, ``NoEndpointError`` if all are excluded.
        """

        def is_over() -> bool:
            return self._dispatcher.all_excluded() or any(e.is_up for e in self.endpoints)

        in_time = await wait_out(is_over, timeout_s, lambda: str(self._dispatcher.no_endpoint()))
        live = [endpoint for endpoint in self.endpoints if endpoint.is_up]
        if not live:
            problem = self._dispatcher.no_endpoint()
            raise problem if in_time else Outage.after(timeout_s, problem)
        return live

    @property
    def in_outage(self) -> bool:
        """Nobody is up, or nobody can answer those who wait; it ends after ``max_outage_s``."""
        return self._dispatcher.in_outage or not any(endpoint.is_up for endpoint in self.endpoints)

    # ---- looking ---------------------------------------------------------------------------------

    def _look_in(self, endpoint: Endpoint, delay_s: float) -> None:
        """Replaces the look that is due."""
        if (timer := self._timers.pop(endpoint, None)) is not None:
            timer.cancel()
        if not self._closed and endpoint in self.endpoints:
            loop = asyncio.get_running_loop()
            self._timers[endpoint] = loop.call_later(delay_s, self._look_now, endpoint)

    def _look_now(self, endpoint: Endpoint) -> None:
        del self._timers[endpoint]
        self._start(self._look_and_go_on(endpoint))

    async def _look_and_go_on(self, endpoint: Endpoint) -> None:
        if endpoint.excluded is not None:
            return
        began_s = time.monotonic()
        try:
            await self._look(endpoint)
        finally:  # an endpoint that nobody looks at would never come back
            if endpoint not in self._timers:  # else it was set aside meanwhile
                delay_s = self._interval_s
                if endpoint.down is not None:
                    delay_s = min(delay_s, _back_off(self.back_off_s, endpoint.num_unanswered))
                self._look_in(endpoint, max(0.0, began_s + delay_s - time.monotonic()))

    async def _look(self, endpoint: Endpoint) -> None:
        confirmed, current = endpoint.confirmed_version, self._current_version
        num_failures = endpoint.num_failures
        try:
            served = await self._served_version(endpoint)
        except EndpointError as error:
            says_no = isinstance(error, RequestRejected | MalformedResponse)
            endpoint.refused = error if says_no else None
            self._unanswered(endpoint, error)
            return
        endpoint.num_unanswered = 0
        await self._look_for_progress(endpoint)
        if num_failures != endpoint.num_failures:
            return  # it was set aside meanwhile
        if self._admission is not None and (refusal := self._admission(endpoint)) is not None:
            self.exclude(endpoint, refusal)
            return
        if endpoint.context < SMALLEST_CONTEXT:
            reason = f"says that it serves at most {endpoint.context} tokens: no prompt has room"
            self.exclude(endpoint, f"{reason}; raise its --max-model-len")
            return
        if endpoint.down is not None:
            log.warning("%s answers%s", endpoint.url, " again" if endpoint.num_failures else "")
            endpoint.down = None
        if (confirmed, current) == (endpoint.confirmed_version, self._current_version):
            if confirmed is not None and served not in (None, confirmed):
                reason = f"serves {served}{other_run(confirmed, served)}"
                self._lose_confirmation(endpoint, confirmed, reason)
            elif confirmed != current:
                self._start_repair(endpoint)
            else:
                endpoint.last_usable_s = time.monotonic()
        self._dispatcher.changed(endpoint)

    async def _served_version(self, endpoint: Endpoint) -> str | None:
        """None if it does not tell, which only matters where weights are moved."""
        try:
            async with asyncio.timeout(self.probe_timeout_s):
                if endpoint.down is not None or endpoint.served is None:  # may be another one now
                    await endpoint.client.health()
                    endpoint.served = await endpoint.client.served_model()
                    self.limits.look(endpoint)
                    endpoint.num_devices = await endpoint.client.num_workers()
                    await self._pay_canary(endpoint)
                try:
                    return await endpoint.client.weight_version(self.probe_timeout_s)
                except RequestRejected:
                    return None
        except TimeoutError:
            reason = f"did not say within {self.probe_timeout_s:g} s how it is"
            raise EndpointUnavailable(endpoint.url, reason) from None

    async def _pay_canary(self, endpoint: Endpoint) -> None:
        """One that refused the canary prompt has to serve it, however healthy it says it is."""
        if endpoint.owes_canary is not None:
            problem = await self.canary.problem(endpoint, endpoint.owes_canary)
            if isinstance(problem, NoSuchModel):
                return  # it owes it until it has its adapter
            if problem is not None:
                reason = f"still refuses the canary prompt: {problem.reason}"
                raise EndpointUnavailable(endpoint.url, reason)
            endpoint.owes_canary = None

    def _unanswered(self, endpoint: Endpoint, error: EndpointError) -> None:
        endpoint.num_unanswered += 1
        if endpoint.down is not None:
            endpoint.down = error.reason
        if endpoint.num_unanswered >= NUM_UNANSWERED:
            self._give_up(
                endpoint, f"{endpoint.num_unanswered} health probes unanswered: {error.reason}"
            )

    async def _look_for_progress(self, endpoint: Endpoint) -> None:
        """A response is one answer at its end: until then the tokens that are made tell.

        They may be somebody else's, so that they are believed for as long as a response can take.
        """
        if endpoint.num_inflight == 0:
            return
        limit_s = self._config.progress_timeout_s
        now_s = time.monotonic()
        quiet_s, unanswered_s = now_s - endpoint.last_progress_s, now_s - endpoint.last_answer_s
        if quiet_s >= limit_s / 4 and await endpoint.makes_tokens(self.probe_timeout_s):
            endpoint.last_progress_s = time.monotonic()
            longest_s = endpoint.longest_response_s(self._s_per_token(endpoint))
            if unanswered_s >= max(limit_s, longest_s):
                reason = f"no answer for {unanswered_s:.0f} s, though its token counters grow"
                self._give_up(endpoint, f"{reason}: no response takes so long")
        elif quiet_s >= limit_s:
            reason = f"no progress for {quiet_s:.0f} s (inference.progress_timeout_s)"
            self._give_up(endpoint, reason)

    def _s_per_token(self, endpoint: Endpoint) -> float:
        """As its responses took; before it has given any, as those of the slowest other did."""
        if endpoint.s_per_token is not None:
            return endpoint.s_per_token
        others = [e.s_per_token for e in self.endpoints if e.s_per_token is not None]
        return max(others, default=SLOWEST_S_PER_TOKEN)

    def _give_up(self, endpoint: Endpoint, reason: str) -> None:
        """It hangs: what it has in flight goes to the others."""
        error = EndpointUnavailable(endpoint.url, reason)
        if endpoint.down is None:
            self._set_down(endpoint, error)
        endpoint.abort_attempts(error)

    # ---- bringing back ---------------------------------------------------------------------------

    def set_repair(self, repair: Repair) -> None:
        """What brings an endpoint that is up to the current version, and calls ``confirm``.

        If it raises ``EndpointUnavailable`` the endpoint is down and it is tried again later; any
        other ``EndpointError`` excludes the endpoint.
        """
        self._repair = repair

    def _start_repair(self, endpoint: Endpoint) -> None:
        if self._repair is None or self._current_version is None:
            return
        if not self._closed and not endpoint.repairing and endpoint.is_up:
            endpoint.repairing = True
            self._start(self._run_repair(endpoint, self._repair, self._current_version))

    async def _run_repair(self, endpoint: Endpoint, repair: Repair, version: str) -> None:
        try:
            await repair(endpoint)
        except EndpointUnavailable as error:
            self.set_aside(endpoint, error)
        except EndpointError as error:
            if self._current_version == version:
                reason = f"could not be given its weights back: {error.reason}"
                self.exclude(endpoint, reason)
        finally:
            endpoint.repairing = False
            self._dispatcher.changed(endpoint)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("watching the endpoints failed; this is a bug", exc_info=error)


def _back_off(first_s: float, num_failures: int) -> float:
    return min(first_s * 2 ** min(max(num_failures, 1) - 1, 16), MAX_BACK_OFF_S)
