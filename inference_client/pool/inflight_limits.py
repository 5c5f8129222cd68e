"""Requests that each endpoint is given at a time (``inference.max_inflight``), batch by batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

from easyrl.inference_client.pool.adaptive_limit import AdaptiveLimit, Choice
from easyrl.inference_client.pool.decode_speed import TimedResponse
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.group_assignment import GroupAssignment

log = logging.getLogger(__name__)

MOST = 256  # requests at a time, where the server does not say that it takes fewer


class InflightLimits:
    """A fixed limit for every endpoint, or one for each that follows what is measured.

    With ``auto`` each limit holds while groups of a batch are asked for; what else is asked for,
    as an evaluation behind the batch, may have all that the endpoint takes. Belongs to the pool's
    loop but for ``begin_batch`` and ``trained``.

    A batch of which groups are there already, or that begins again, is not measured: what it asks
    for is a part of a batch, or more than one.

    Args:
        num_shares: processes that share the endpoints, each with limits of its own that together
            stay within what an endpoint takes.

    Attributes:
        launched_with: by URL, sequences that servers decode at a time whose command line is the
            run's own.
        on_choice: told of each.
        clock: of the times of responses.
    """

    def __init__(self, max_inflight: int | Literal["auto"], num_shares: int) -> None:
        self._fixed = None if max_inflight == "auto" else max(1, max_inflight // num_shares)
        self._num_shares = num_shares
        self._adaptive: dict[Endpoint, AdaptiveLimit] = {}
        self._holds = False
        self._train_s = 0.0  # of a group, the last batch's; 0: not told
        self._num_begun = 0  # times that the open batch was
        self._is_part = False
        self.launched_with: Mapping[str, int] = {}
        self.on_choice: Callable[[Endpoint, Choice], object] = lambda endpoint, choice: None
        self.clock: Callable[[], float] = time.monotonic

    @property
    def at_first(self) -> int:
        """Of an endpoint that has said nothing yet."""
        return max(1, MOST // self._num_shares) if self._fixed is None else self._fixed

    def of(self, endpoint: Endpoint, *, in_batch: bool) -> int:
        """Requests that ``endpoint`` is given at a time while a batch is asked for, or else."""
        limit = self._adaptive.get(endpoint)
        if limit is None:
            return self.at_first
        return limit.max_inflight if in_batch else limit.most

    def look(self, endpoint: Endpoint) -> None:
        """``endpoint`` has said what it serves: no more than its ``max_num_seqs`` at a time."""
        if self._fixed is not None:
            return
        said = None if endpoint.served is None else endpoint.served.max_num_seqs
        given = self.launched_with.get(endpoint.url)
        most = max(1, min(MOST, said or MOST, given or MOST) // self._num_shares)
        known = self._adaptive.get(endpoint)
        if known is None or known.most != most:  # another server, perhaps
            self._adaptive[endpoint] = AdaptiveLimit(most)
            self._set(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        self._adaptive.pop(endpoint, None)

    def begin_batch(self, num_recovered: int) -> None:
        """A batch begins, or begins again, of which so many groups are there. Any thread."""
        self._num_begun += 1
        self._is_part = num_recovered > 0 or self._num_begun > 1

    def hold(self) -> None:
        """A group of a batch is about to be asked for."""
        if not self._holds:
            self._holds = True
            self._set(*self._adaptive)

    def lift(self) -> None:
        """The open batch asks for nothing any more."""
        self._holds = False
        self._set(*self._adaptive)

    def answered(self, endpoint: Endpoint, group: GroupAssignment, response: TimedResponse) -> None:
        """A response that can be used."""
        limit = self._adaptive.get(endpoint)
        if limit is None or not group.is_of_batch or not response.num_tokens:
            return
        if group.session_of is None:
            limit.saw(group, response)
        else:  # a turn: the session's next one begins when this one has ended
            limit.saw(group.session_of, response, session=group)

    def trained(self, seconds: float, num_groups: int) -> None:
        """What training cost this process in the last batch. Any thread.

        Never told where training begins with the last group only.
        """
        if num_groups:
            self._train_s = seconds / num_groups

    def end_batch(self) -> None:
        """The weights are about to move: the next batch's limits are found."""
        if self._is_part:
            for limit in self._adaptive.values():
                limit.forget_batch()
        self._num_begun, self._is_part = 0, False
        num_responses = sum(limit.num_responses for limit in self._adaptive.values())
        now_s = self.clock()
        for endpoint, limit in self._adaptive.items():
            train_s = self._train_s * num_responses / max(1, limit.num_responses)
            if (choice := limit.end_batch(train_s, now_s)) is not None:
                log.warning("inference.max_inflight: %s: %s", endpoint.url, choice)
                self.on_choice(endpoint, choice)
        self.lift()

    def _set(self, *endpoints: Endpoint) -> None:
        for endpoint in endpoints:
            endpoint.max_inflight = self.of(endpoint, in_batch=self._holds)
