"""What the pool knows of one endpoint: may it be used, how much it has to do."""

from __future__ import annotations

import time

from easyrl.inference_client.client import EndpointClient, ServedModel


class Endpoint:
    """One inference server. Only the pool, on its loop, changes it; anyone may read.

    An endpoint is *eligible* for a version when it is not excluded and has confirmed that version
    (DESIGN §2.1), and *ready* when it is also up and has room.
    """

    def __init__(self, client: EndpointClient, max_inflight: int) -> None:
        self.client = client
        self.url = client.url
        self.max_inflight = max_inflight
        self.served: ServedModel | None = None  # known once healthy
        self.confirmed_version: str | None = None
        self.excluded: str | None = None  # why it gets no more requests
        self.down: str | None = None  # why it is set aside for now
        self.down_since_s = 0.0
        self.lost_confirmation: str | None = None  # why it has to prove its weights again
        self.repairing = False
        self.num_inflight = 0
        self.outstanding_tokens = 0  # upper bound: prompts and max_tokens of what is in flight
        self.num_requests = 0
        self.num_failures = 0
        self.num_consecutive_failures = 0
        self.last_answer_s = 0.0
        self._idle_since_s: float | None = time.monotonic()
        self._idle_s = 0.0

    def eligible(self, version: str | None) -> bool:
        return self.excluded is None and (version is None or self.confirmed_version == version)

    def ready(self, version: str | None) -> bool:
        return (
            self.eligible(version) and self.down is None and self.num_inflight < self.max_inflight
        )

    def begin(self, num_tokens: int) -> None:
        """A request was sent."""
        if self._idle_since_s is not None:
            self._idle_s += time.monotonic() - self._idle_since_s
            self._idle_since_s = None
        self.num_requests += 1
        self.num_inflight += 1
        self.outstanding_tokens += num_tokens

    def end(self, num_tokens: int) -> None:
        """It was answered, has failed, or was cancelled."""
        self.num_inflight -= 1
        self.outstanding_tokens -= num_tokens
        if self.num_inflight == 0:
            self._idle_since_s = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the start in which nothing was in flight."""
        since = self._idle_since_s
        return self._idle_s + (0.0 if since is None else time.monotonic() - since)

    def status(self, version: str | None) -> str:
        """Why it cannot be used, or that it can, in words."""
        if self.excluded is not None:
            return f"excluded: {self.excluded}"
        if self.down is not None:
            return f"down: {self.down}"
        if not self.eligible(version):
            confirmed = "no version" if self.confirmed_version is None else self.confirmed_version
            why = "" if self.lost_confirmation is None else f" ({self.lost_confirmation})"
            return f"has confirmed {confirmed}, not {version}{why}"
        return "usable"
