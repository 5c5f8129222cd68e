"""What the pool knows of one endpoint: may it be used, how much it has to do."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import NamedTuple

from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient, ServedModel
from easyrl.inference_client.errors import EndpointError

UNLIMITED = sys.maxsize  # the context of an endpoint that does not tell its length
SLOWDOWN = 8  # a response may take so many times as long for a token as the others took


class Need(NamedTuple):
    """What an endpoint must have to answer a request: a policy version, room in its context."""

    version: str | None  # of the policy that has to answer, None for any
    # tokens, of prompt and response together; 0: so few that every endpoint has room for them
    context: int = 0
    least: int = 0  # with the shortest response that is worth asking for
    other_than: Endpoint | None = None  # it refused the prompt, and another is awaited


class Endpoint:
    """One inference server. Only the pool, on its loop, changes it; anyone may read.

    An endpoint is *usable* for a version when it is up, neither excluded nor leaving, and has
    confirmed that version (docs/on_policy.md).
    """

    def __init__(self, client: EndpointClient, max_inflight: int) -> None:
        self.client = client
        self.url = client.url
        self.max_inflight = max_inflight
        self.served: ServedModel | None = None  # known once healthy
        self.num_devices: int | None = None  # that it says it runs on
        self.confirmed_version: str | None = None
        # Unset while it may answer and has yet to pass its canary: what it answers is held back.
        self.cleared = asyncio.Event()
        self.cleared.set()
        self.confirmed_s = 0.0  # when it has last confirmed a version, time.monotonic()
        self.proof = 0  # number of its last good proof in this attempt of the run, by URL
        self.excluded: str | None = None  # why it gets no more requests
        self.down: str | None = None  # why it is set aside for now
        self.refused: EndpointError | None = None  # it answers, and will not serve us
        # It is down for refusing the canary prompt with these: it returns by serving it.
        self.owes_canary: SamplingConfig | None = None
        # It says that it streams samples, and has refused to, whatever they were: not asked again.
        self.refuses_streams = False
        self.num_false_refusals = 0  # of prompts that another served, since the weights moved last
        self.lost_confirmation: str | None = None  # why it has to prove its weights again
        self.repairing = False
        self.leaving = False  # removed: what is in flight finishes, nothing new comes
        # in flight, and what has aborted it from outside, as a failure of the endpoint
        self.attempts: dict[asyncio.Task, EndpointError | None] = {}
        self.num_inflight = 0
        self.num_reserved = 0  # places for samples of groups that are just being sent here
        self.outstanding_tokens = 0  # expected of what is in flight or reserved
        self.num_requests = 0
        self.num_completed = 0
        self.num_failures = 0
        self.num_consecutive_failures = 0  # ended by an answer, or new weights
        self.num_unanswered = 0  # health probes in a row
        self.last_usable_s = time.monotonic()  # when it was last seen so, or joined
        self.last_progress_s = 0.0
        self.last_answer_s = 0.0  # ... or when it got something to do
        self._most_tokens = 0  # max_tokens of what it was sent since then, the largest
        self._num_tokens_answered = 0
        self._answered_s = 0.0  # that the responses took, together
        self._num_tokens_made: float | None = None  # when it was last asked
        self._idle_since_s: float | None = time.monotonic()
        self._idle_s = 0.0
        self._idle_taken_s = 0.0

    @property
    def is_up(self) -> bool:
        return self.down is None and self.excluded is None and not self.leaving

    @property
    def has_room(self) -> bool:
        return self.num_inflight < self.max_inflight

    @property
    def has_free_room(self) -> bool:
        """... that is not held for samples of a group."""
        return self.num_inflight + self.num_reserved < self.max_inflight

    @property
    def is_idle(self) -> bool:
        return self.num_inflight + self.num_reserved == 0

    def usable(self, version: str | None) -> bool:
        return self.is_up and (version is None or self.confirmed_version == version)

    @property
    def streams_samples(self) -> bool:
        return self.served is not None and self.served.streams_samples and not self.refuses_streams

    @property
    def is_in_use(self) -> bool:
        """Up, or it may come back."""
        return self.excluded is None and not self.leaving

    @property
    def context(self) -> int:
        """Tokens of prompt and response together that it says it serves; 0 before it has said."""
        if self.served is None:
            return 0
        limit = self.served.max_model_len
        return UNLIMITED if limit is None else limit

    def serves(self, need: Need) -> bool:
        """Whether a request with this ``need`` may go here."""
        if self is need.other_than:
            return False
        return self.usable(need.version) and self.context >= need.context

    def may_have_room(self, num_tokens: int) -> bool:
        """As far as it has said."""
        return self.served is None or self.context >= num_tokens

    def is_awaited(self, version: str | None, limit_s: float) -> bool:
        """Usable, or in use and so at some time in the last ``limit_s``, or being repaired."""
        if self.usable(version):
            return True
        is_recent = time.monotonic() - self.last_usable_s < limit_s
        return self.is_in_use and (self.repairing or is_recent)

    def begin(self, num_tokens: int) -> None:
        """A place is taken: a request is about to be sent."""
        if self.num_inflight == 0:
            now_s = time.monotonic()
            self.last_progress_s = self.last_answer_s = now_s  # what was before does not count
            self._most_tokens = 0
            if self._idle_since_s is not None:
                self._idle_s += now_s - self._idle_since_s
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

    def asked(self, max_tokens: int) -> None:
        """A response of at most so many tokens is about to be asked for."""
        self._most_tokens = max(self._most_tokens, max_tokens)

    def progressed(self) -> None:
        """A response came; whether it can be used may be open."""
        self.last_progress_s = self.last_answer_s = time.monotonic()

    def answered(self, num_tokens: int, took_s: float) -> None:
        """A response that came can be used."""
        self.num_completed += 1
        self.num_consecutive_failures = 0
        self._num_tokens_answered += num_tokens
        self._answered_s += took_s

    @property
    def s_per_token(self) -> float | None:
        """Seconds that its responses took for a token, queue and prompt included; the mean."""
        return self._answered_s / self._num_tokens_answered if self._num_tokens_answered else None

    def longest_response_s(self, s_per_token: float) -> float:
        """Far longer than any response takes that it was asked for, at this speed."""
        return SLOWDOWN * s_per_token * self._most_tokens

    async def makes_tokens(self, timeout_s: float) -> bool:
        """Whether it has made some since it was last asked; False if it does not tell."""
        count = await self.client.num_tokens_made(timeout_s)
        if count is None:
            return False
        before, self._num_tokens_made = self._num_tokens_made, count
        return before is not None and count != before

    def abort_attempts(self, error: EndpointError) -> None:
        """What is in flight fails here, and goes elsewhere."""
        for task, aborted in self.attempts.items():
            if aborted is None:
                self.attempts[task] = error
                task.cancel()

    def idle_s(self) -> float:
        """Seconds since the start in which nothing was in flight."""
        since = self._idle_since_s
        return self._idle_s + (0.0 if since is None else time.monotonic() - since)

    def take_idle_s(self) -> float:
        """... since this was last asked."""
        before_s, self._idle_taken_s = self._idle_taken_s, self.idle_s()
        return self._idle_taken_s - before_s

    def status(self, version: str | None) -> str:
        """Why it cannot be used for ``version``, or that it can, in words."""
        if self.leaving:
            return "removed, finishes what is in flight"
        if self.excluded is not None:
            return f"excluded: {self.excluded}"
        if self.down is not None:
            return f"down: {self.down}"
        if self.repairing:
            return "is given its weights back"
        if version is not None and self.confirmed_version != version:
            confirmed = "no version" if self.confirmed_version is None else self.confirmed_version
            why = "" if self.lost_confirmation is None else f" ({self.lost_confirmation})"
            return f"has confirmed {confirmed}, not {version}{why}"
        return "usable"
