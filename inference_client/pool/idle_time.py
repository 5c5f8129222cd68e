"""How long endpoints had nothing to do, while they come and go."""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.inference_client.pool.endpoint import Endpoint


class IdleTime:
    """Sums up what the endpoints idled, each share of time over those that were there then."""

    def __init__(self) -> None:
        self._seen_s: dict[Endpoint, float] = {}
        self._mean_s = 0.0

    def mean_s(self, endpoints: Sequence[Endpoint]) -> float:
        """Seconds idled since the start, mean over endpoints; never falls."""
        now_s = {endpoint: endpoint.idle_s() for endpoint in endpoints}
        if now_s:
            added = [idle_s - self._seen_s.get(e, 0.0) for e, idle_s in now_s.items()]
            self._mean_s += sum(added) / len(added)
        self._seen_s = now_s
        return self._mean_s
