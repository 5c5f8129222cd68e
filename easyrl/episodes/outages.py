"""Environments that cannot be reached: rollouts wait and try again, until it has lasted too long.

Consumes: rollouts that found nothing to connect to, before their first turn. Waits for: a pause,
longer each time. Is unblocked by: time. Produces: another try, or the end of the run as in an
outage of endpoints, to go on from later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from easyrl.environments.failures import EnvironmentUnreachable
from easyrl.inference_client.errors import Outage
from easyrl.metrics.event_log import Record, ignore

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0


@dataclass
class EnvironmentOutages:
    """Which environments nothing has been had of lately. Belongs to the producer's loop."""

    limit_s: float = 1800.0  # inference.max_outage_s
    first_pause_s: float = FIRST_PAUSE_S
    record: Record = ignore
    _since_s: dict[str, float] = field(default_factory=dict, init=False)  # time.monotonic()

    @property
    def any(self) -> bool:
        """Whether one cannot be reached now. From any thread."""
        return bool(self._since_s)

    def reached(self, environment: str) -> None:
        """A rollout of it has asked for a turn."""
        since_s = self._since_s.pop(environment, None)
        if since_s is not None:
            took_s = time.monotonic() - since_s
            self.record("environment_reached", environment=environment, seconds=took_s)
            log.warning("environment %s is there again after %.1f s", environment, took_s)

    def waiting(self) -> Waiting:
        """For one rollout that is to be tried again."""
        return Waiting(self)

    def begin(self, error: EnvironmentUnreachable) -> float:
        """Since when its environment cannot be reached, time.monotonic(): now, if it could be."""
        name = error.environment
        if name not in self._since_s:
            self._since_s[name] = time.monotonic()
            self.record("environment_unreachable", environment=name, problem=str(error))
            log.warning("%s\nit is tried again, for %.0f s at most", error, self.limit_s)
        return self._since_s[name]


@dataclass
class Waiting:
    """The tries of one rollout."""

    outages: EnvironmentOutages
    _began_s: float | None = field(default=None, init=False)
    _num_pauses: int = field(default=0, init=False)

    async def pause(self, error: EnvironmentUnreachable) -> bool:
        """Waits before the next try; False: this rollout has no more, while others got through.

        Raises ``Outage`` where nothing was had of the environment for ``limit_s``.
        """
        since_s, now_s = self.outages.begin(error), time.monotonic()
        limit_s = self.outages.limit_s
        self._began_s = now_s if self._began_s is None else self._began_s
        if now_s - since_s >= limit_s:
            waited_s = round(now_s - since_s, 1)
            raise Outage(
                f"{error}\nfor {waited_s:g} s (inference.max_outage_s); start what it connects to "
                "again"
            )
        if now_s - self._began_s >= limit_s:
            return False
        pause_s = min(self.outages.first_pause_s * 2**self._num_pauses, LONGEST_PAUSE_S)
        self._num_pauses += 1
        await asyncio.sleep(min(pause_s, limit_s - (now_s - since_s)))
        return True
