"""Outages: no endpoint is up; requests wait, the log says so, the run ends after a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from easyrl.inference_client.errors import NoEndpointError, Outage
from easyrl.inference_client.pool.dispatch import Dispatcher
from easyrl.inference_client.pool.endpoint import Endpoint

log = logging.getLogger(__name__)

SAY_INTERVAL_S = 30.0
POLL_S = 0.1


class OutageWatch:
    """Ends the waiting of requests for which no endpoint is usable.

    With ``Outage`` after ``limit_s``, with ``NoEndpointError`` when there is nothing to hope for,
    because every endpoint failed its proof.
    """

    def __init__(self, dispatcher: Dispatcher, limit_s: float) -> None:
        self._dispatcher = dispatcher
        self._limit_s = limit_s
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Somebody waits while nobody can answer."""
        return self._watching is not None

    def look(self) -> None:
        """Call it when somebody waits, or an endpoint has changed."""
        stuck = self._stuck_versions()
        if stuck and self.all_excluded():
            for version in stuck:
                self._dispatcher.fail(version, self.no_endpoint(version))
        elif stuck and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def no_endpoint(self, version: str | None) -> NoEndpointError:
        """Names each endpoint and why it is not usable."""
        what = "" if version is None else f" for version {version}"
        endpoints = self._dispatcher.endpoints
        return NoEndpointError(f"no usable endpoint{what}:{status_lines(endpoints, version)}")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def _stuck_versions(self) -> list[str | None]:
        waiting = self._dispatcher.waiting_versions()
        return [v for v in waiting if not any(e.usable(v) for e in self._dispatcher.endpoints)]

    def all_excluded(self) -> bool:
        endpoints = self._dispatcher.endpoints
        return bool(endpoints) and all(e.excluded is not None for e in endpoints)

    async def _watch(self) -> None:
        try:
            is_over = await wait_out(
                lambda: not self._stuck_versions(),
                self._limit_s,
                lambda: str(self.no_endpoint(next(iter(self._stuck_versions()), None))),
                goes_on=lambda: any(endpoint.repairing for endpoint in self._dispatcher.endpoints),
            )
        finally:
            self._watching = None
        for version in [] if is_over else self._stuck_versions():
            error = f"{self.no_endpoint(version)}\nfor {self._limit_s:g} s (inference.max_outage_s)"
            self._dispatcher.fail(version, Outage(error))
        self.look()  # somebody may have begun to wait since


async def wait_out(
    is_over: Callable[[], bool],
    limit_s: float,
    describe: Callable[[], str],
    *,
    goes_on: Callable[[], bool] = lambda: False,
) -> bool:
    """Waits until ``is_over``; False if it is not after ``limit_s``.

    Logs what ``describe`` says once, then every 30 s, with the seconds left. While ``goes_on``
    (something that will end the outage is under way) the limit does not end the waiting.
    """
    if is_over():
        return True
    start_s = said_s = time.monotonic()
    log.warning("%s\nwaiting for one to return, for %.0f s at most", describe(), limit_s)
    while not is_over():
        now_s = time.monotonic()
        left_s = start_s + limit_s - now_s
        if left_s <= 0 and not goes_on():
            return False
        if now_s - said_s >= SAY_INTERVAL_S:
            said_s = now_s
            log.warning("%s\nstill waiting, for %.0f s at most", describe(), max(left_s, 0.0))
        await asyncio.sleep(min(POLL_S, left_s) if left_s > 0 else POLL_S)
    log.warning("an endpoint is there again after %.1f s", time.monotonic() - start_s)
    return True


def status_lines(endpoints: Sequence[Endpoint], version: str | None) -> str:
    """A line for each endpoint: how it is, seen from ``version``."""
    if not endpoints:
        return " there is none; add one with easyrl endpoints add"
    return "".join(f"\n  {e.url}: {e.status(version)}" for e in endpoints)
