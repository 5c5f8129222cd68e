"""Which endpoints are up, and which weights they serve: they come and go while a run goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from easyrl.config import InferenceConfig
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, RequestRejected
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.progress import TokenCounter

log = logging.getLogger(__name__)

Repair = Callable[[Endpoint], Awaitable[None]]
Admission = Callable[[Endpoint], str | None]  # why it may not take part

MAX_BACK_OFF_S = 30.0
MAX_PROBE_TIMEOUT_S = 10.0
MIN_PROBE_TIMEOUT_S = 1.0
NUM_UNANSWERED = 2  # probes in a row that make a hang


class Health:
    """Asks every endpoint every ``health_interval_s`` which version it serves.

    Consumes: ``/weight_info``. Waits for: answers, with a limit. Is unblocked by: them. Produces:
    endpoints that are up or *down*, and a ``repair`` for each that is up without the current
    weights. A busy endpoint is never timed out because it is slow: it has to leave
    probes unanswered, or to make no progress at all for ``progress_timeout_s``.

    Args:
        tokens: tells whether an endpoint goes on generating though it answers nothing.
        changed: called after an endpoint has become usable or unusable.
        back_off_s: how long an endpoint is set aside after a first failure; doubles up to 30 s.
        probe_timeout_s: for one probe; default twice ``health_interval_s``, from 1 to 10 s.
    """

    def __init__(
        self,
        config: InferenceConfig,
        tokens: TokenCounter,
        changed: Callable[[Endpoint], None],
        *,
        back_off_s: float,
        probe_timeout_s: float | None = None,
    ) -> None:
        self._progress_timeout_s = config.progress_timeout_s
        self._interval_s = min(config.health_interval_s, config.progress_timeout_s / 4)
        twice_s = max(MIN_PROBE_TIMEOUT_S, 2 * config.health_interval_s)
        self._timeout_s = probe_timeout_s or min(MAX_PROBE_TIMEOUT_S, twice_s)
        self._back_off_s = back_off_s
        self._tokens = tokens
        self._changed = changed
        self._timers: dict[Endpoint, asyncio.TimerHandle] = {}  # of the next look at each
        self._background: set[asyncio.Task] = set()
        self._closed = False
        self._num_proofs: Counter[str] = Counter()  # good ones, by URL: it may leave and come back
        self.current_version: str | None = None  # last confirmed; None while the weights move
        self.repair: Repair | None = None
        self.admission: Admission | None = None

    def watch(self, endpoint: Endpoint) -> None:
        """From now on; the first look is at once."""
        self._look_in(endpoint, 0.0)

    def forget(self, endpoint: Endpoint) -> None:
        """It was removed."""
        if (timer := self._timers.pop(endpoint, None)) is not None:
            timer.cancel()
        self._tokens.forget(endpoint)

    async def close(self) -> None:
        """Ends looks and repairs."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # ---- what others have seen -----------------------------------------------------------------

    def confirm(self, endpoint: Endpoint, version: str) -> None:
        self.current_version = version
        self._num_proofs[endpoint.url] += 1
        endpoint.proof = self._num_proofs[endpoint.url]
        endpoint.confirmed_version = version
        endpoint.lost_confirmation = None
        endpoint.down = None
        endpoint.num_unanswered = endpoint.num_consecutive_failures = 0
        self._changed(endpoint)

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
        if self.repair is not None:  # what comes back may have restarted
            endpoint.confirmed_version = None
            endpoint.lost_confirmation = f"was down: {error.reason}"
        self._look_in(endpoint, _back_off(self._back_off_s, num_in_a_row))
        self._changed(endpoint)

    def lose_confirmation(self, endpoint: Endpoint, version: str, reason: str) -> None:
        """It was seen to serve something else than ``version``, which it had confirmed."""
        if endpoint.confirmed_version != version:
            return  # known, or the weights have moved meanwhile
        log.warning("%s no longer serves %s: %s", endpoint.url, version, reason)
        endpoint.confirmed_version = None
        endpoint.lost_confirmation = reason
        self._start_repair(endpoint)
        self._changed(endpoint)

    def quarantine(self, endpoint: Endpoint, reason: str) -> None:
        """It failed a proof: not used until it is confirmed again; what is in flight goes away."""
        endpoint.confirmed_version = None
        endpoint.lost_confirmation = reason
        endpoint.abort_attempts(EndpointUnavailable(endpoint.url, f"quarantined: {reason}"))
        self._changed(endpoint)

    def exclude(self, endpoint: Endpoint, reason: str) -> None:
        """It failed its proof; what it has in flight goes to the others."""
        log.warning("%s is excluded: %s", endpoint.url, reason)
        endpoint.excluded = reason
        endpoint.abort_attempts(EndpointUnavailable(endpoint.url, f"excluded: {reason}"))
        self._changed(endpoint)

    # ---- looking -------------------------------------------------------------------------------

    async def look(self, endpoint: Endpoint) -> None:
        """Asks one endpoint; what follows from the answer is done before it returns."""
        confirmed, current = endpoint.confirmed_version, self.current_version
        num_failures = endpoint.num_failures
        try:
            served = await self._served_version(endpoint)
        except EndpointError as error:
            self._unanswered(endpoint, error)
            return
        endpoint.num_unanswered = 0
        await self._look_for_progress(endpoint)
        if num_failures != endpoint.num_failures:
            return  # it was set aside meanwhile
        if self.admission is not None and (refusal := self.admission(endpoint)) is not None:
            self.exclude(endpoint, refusal)
            return
        if endpoint.down is not None:
            log.warning("%s answers%s", endpoint.url, " again" if endpoint.num_failures else "")
            endpoint.down = None
        if (confirmed, current) == (endpoint.confirmed_version, self.current_version):
            if confirmed is not None and served not in (None, confirmed):
                self.lose_confirmation(endpoint, confirmed, f"serves {served}")
            elif confirmed != current:
                self._start_repair(endpoint)
        self._changed(endpoint)

    async def _served_version(self, endpoint: Endpoint) -> str | None:
        """None if it does not tell, which only matters where weights are moved."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if endpoint.down is not None or endpoint.served is None:  # may be another one now
                    await endpoint.client.health()
                    endpoint.served = await endpoint.client.served_model()
                try:
                    return await endpoint.client.weight_version(self._timeout_s)
                except RequestRejected:
                    return None
        except TimeoutError:
            reason = f"did not say within {self._timeout_s:g} s how it is"
            raise EndpointUnavailable(endpoint.url, reason) from None
        except RequestRejected as error:
            endpoint.refused = error
            raise

    def _unanswered(self, endpoint: Endpoint, error: EndpointError) -> None:
        endpoint.num_unanswered += 1
        if endpoint.down is not None:
            endpoint.down = error.reason
        if endpoint.num_unanswered >= NUM_UNANSWERED:
            reason = f"{endpoint.num_unanswered} health probes unanswered: {error.reason}"
            self._give_up(endpoint, EndpointUnavailable(endpoint.url, reason))

    async def _look_for_progress(self, endpoint: Endpoint) -> None:
        if endpoint.num_inflight == 0:
            return
        quiet_s = time.monotonic() - endpoint.last_progress_s
        if quiet_s >= self._progress_timeout_s / 4 and await self._tokens.have_grown(
            endpoint, self._timeout_s
        ):
            endpoint.last_progress_s = time.monotonic()
        elif quiet_s >= self._progress_timeout_s:
            reason = f"no progress for {quiet_s:.0f} s (inference.progress_timeout_s)"
            self._give_up(endpoint, EndpointUnavailable(endpoint.url, reason))

    def _give_up(self, endpoint: Endpoint, error: EndpointUnavailable) -> None:
        """It hangs: what it has in flight goes to the others."""
        if endpoint.down is None:
            self._set_down(endpoint, error)
        endpoint.abort_attempts(error)

    def _look_in(self, endpoint: Endpoint, delay_s: float) -> None:
        """Replaces the look that is due."""
        if (timer := self._timers.pop(endpoint, None)) is not None:
            timer.cancel()
        if not self._closed and not endpoint.left:
            loop = asyncio.get_running_loop()
            self._timers[endpoint] = loop.call_later(delay_s, self._look_now, endpoint)

    def _look_now(self, endpoint: Endpoint) -> None:
        del self._timers[endpoint]
        self._start(self._look_and_go_on(endpoint))

    async def _look_and_go_on(self, endpoint: Endpoint) -> None:
        if endpoint.excluded is not None:
            return
        before_s = time.monotonic()
        try:
            await self.look(endpoint)
        finally:  # an endpoint that nobody looks at would never come back
            if endpoint not in self._timers:  # else it was set aside meanwhile
                self._look_again(endpoint, before_s)

    def _look_again(self, endpoint: Endpoint, before_s: float) -> None:
        """After a look that began at ``before_s``."""
        if endpoint.down is None:
            delay_s = self._interval_s
        else:
            delay_s = min(self._interval_s, _back_off(self._back_off_s, endpoint.num_unanswered))
        self._look_in(endpoint, max(0.0, delay_s - (time.monotonic() - before_s)))

    # ---- bringing back ---------------------------------------------------------------------------

    def _start_repair(self, endpoint: Endpoint) -> None:
        """Brings an endpoint that is up to the current version."""
        if self.repair is None or self.current_version is None:
            return
        if not self._closed and not endpoint.repairing and endpoint.is_up:
            endpoint.repairing = True
            self._start(self._run_repair(endpoint, self.repair, self.current_version))

    async def _run_repair(self, endpoint: Endpoint, repair: Repair, version: str) -> None:
        try:
            await repair(endpoint)
        except EndpointUnavailable as error:
            self.set_aside(endpoint, error)
        except EndpointError as error:
            if self.current_version == version:
                reason = f"could not be given its weights back: {error.reason}"
                self.exclude(endpoint, reason)
        finally:
            endpoint.repairing = False
            self._changed(endpoint)

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
