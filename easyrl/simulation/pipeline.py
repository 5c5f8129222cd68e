"""Discrete-event simulation of a batch: endpoints that share their speed, ranks that take groups.

Groups are dispatched in order, each to the endpoint with the most free places, when it has one; its
samples are decoded beside whatever else is there, all at the same speed. A finished group waits for
a rank, which trains it; when all are trained the border follows. With several optimizer steps each
has its slice of the groups and waits for the one before. In a synchronous run ranks begin when all
groups are there. Training holds no request up: the two are computed one behind the other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from easyrl.simulation.setting import Outcome, Rates, Setting

NUM_DRAWS = 8


def simulate(setting: Setting, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> Outcome:
    """The mean batch of ``setting``, over ``num_draws`` draws of lengths."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(num_draws):
        lengths = setting.lengths.draw(setting.batch_size, setting.group_size, rng)
        batches.append(simulate_batch(setting, lengths.tolist()))
    return Outcome(*(float(np.mean(column)) for column in zip(*map(astuple, batches), strict=True)))


def simulate_batch(setting: Setting, lengths: Sequence[Sequence[int]]) -> Outcome:
    """One batch. ``lengths``: tokens of each response of each group, in the order of dispatch."""
    generation = _Generation(setting)
    arrivals = generation.run(lengths)
    rates = setting.rates
    per_update = math.ceil(len(lengths) / setting.updates)
    arrived: list[list[Arrival]] = [[] for _ in range(setting.updates)]
    for arrival_s, number in arrivals:
        packed = setting.packed_tokens(lengths[number]) * rates.trained_share
        work_s = packed * rates.train_token_s + rates.train_group_s
        arrived[number // per_update].append(Arrival(arrival_s, work_s))
    last_s = arrivals[-1][0]
    end_s = (last_s if setting.mode == "sync" else 0.0) - rates.update_s
    for groups in filter(None, arrived):
        end_s = trained_s(groups, setting.ranks, start_s=end_s + rates.update_s)
    end_s += rates.border_s
    work_s = sum(group.work_s for groups in arrived for group in groups)
    num_sequences = sum(map(len, lengths))
    return Outcome(
        step_s=end_s,
        first_group_s=arrivals[0][0],
        last_group_s=last_s,
        tokens=float(sum(map(sum, lengths)) + num_sequences * setting.prompt_tokens),
        training_idle=1 - work_s / (end_s * setting.ranks),
        inference_idle=1 - generation.busy_s / (end_s * setting.endpoints * setting.places),
    )


class Arrival(NamedTuple):
    """A complete group."""

    arrival_s: float
    work_s: float  # what its training takes a rank


def trained_s(groups: Sequence[Arrival], ranks: int, *, start_s: float) -> float:
    """When the last of ``groups`` is trained: each is taken by the rank that is free first (paper
    §4.3).

    In the order of their arrival. ``start_s``: before it no rank is free.
    """
    free_s = [start_s] * ranks
    for arrival_s, work_s in groups:
        heapq.heapreplace(free_s, max(free_s[0], arrival_s) + work_s)
    return max(free_s)


class _Endpoint:
    """Decodes up to ``places`` sequences, one token of each at a time.

    ``made`` is how many tokens a sequence would have that was there from the start; it grows at the
    same speed for all, so only the next end has to be known.
    """

    def __init__(self, rates: Rates, places: int) -> None:
        self._rates, self._places = rates, places
        self._running: list[tuple[float, int]] = []  # ``made`` at its end, group; a heap
        self._waiting: deque[tuple[int, int]] = deque()  # tokens, group
        self._made, self._since_s = 0.0, 0.0
        self.busy_s = 0.0  # summed over places
        self.version = 0  # of what it runs

    @property
    def free(self) -> int:
        return self._places - len(self._running) - len(self._waiting)

    @property
    def next_end_s(self) -> float | None:
        """Of the sequence that is finished next, if nothing is added before."""
        if not self._running:
            return None
        left = max(self._running[0][0] - self._made, 0.0)
        return self._since_s + left * self._rates.decode_s(len(self._running))

    def add(self, now_s: float, group: int, lengths: Sequence[int]) -> None:
        self._pass(now_s)
        self._waiting.extend((tokens, group) for tokens in lengths)
        self._admit()

    def finish(self, now_s: float) -> list[int]:
        """The groups of the sequences that end at ``now_s``, which is ``next_end_s``."""
        self._pass(now_s)
        self._made = max(self._made, self._running[0][0])  # no rounding behind the comma
        ended = []
        while self._running and self._running[0][0] <= self._made:
            ended.append(heapq.heappop(self._running)[1])
        self._admit()
        return ended

    def rest(self) -> dict[int, float]:
        """When the last sequence of each group that is left ends; nothing is added any more."""
        running, waiting = self._running, self._waiting
        ended: dict[int, float] = {}
        while waiting:
            end, group = heapq.heappop(running)
            self._pass_to(end, len(running) + 1)
            ended[group] = self._since_s
            tokens, group = waiting.popleft()
            heapq.heappush(running, (self._made + tokens, group))
        running.sort()
        for number, (end, group) in enumerate(running):
            self._pass_to(end, len(running) - number)
            ended[group] = self._since_s
        return ended

    def _pass_to(self, made: float, running: int) -> None:
        """Until sequences have so many tokens; ``running`` are decoded."""
        if made > self._made:
            passed_s = (made - self._made) * self._rates.decode_s(running)
            self._since_s += passed_s
            self.busy_s += passed_s * running
            self._made = made

    def _pass(self, now_s: float) -> None:
        """Counts what has been decoded since the last look."""
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._running and passed_s:
            self._made += passed_s / self._rates.decode_s(len(self._running))
            self.busy_s += passed_s * len(self._running)

    def _admit(self) -> None:
        self.version += 1
        while self._waiting and len(self._running) < self._places:
            tokens, group = self._waiting.popleft()
            heapq.heappush(self._running, (self._made + tokens, group))


class _Generation:
    """A batch's groups on their way through the endpoints."""

    def __init__(self, setting: Setting) -> None:
        self._rates = setting.rates
        self._before_s = self._rates.request_s + self._rates.prefill_s * setting.prompt_tokens
        self._endpoints = [
            _Endpoint(setting.rates, setting.places) for _ in range(setting.endpoints)
        ]
        self._room = [(-setting.places, number) for number in range(setting.endpoints)]  # a heap
        self._ends: list[tuple[float, int, int]] = []  # when, endpoint, its version; a heap

    @property
    def busy_s(self) -> float:
        return sum(endpoint.busy_s for endpoint in self._endpoints)

    def run(self, lengths: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
        """When each group is complete, and which it is, in order."""
        missing = [len(group) for group in lengths]
        arrivals: list[tuple[float, int]] = []
        now_s, sent = 0.0, 0
        while True:
            while sent < len(lengths) and (number := self._most_room()) is not None:
                self._endpoints[number].add(now_s, sent, lengths[sent])
                self._note(number)
                sent += 1
            if sent == len(lengths):
                break
            now_s = self._ends[0][0]
            for number in self._ending(now_s):  # all of them, before the next group is sent
                for group in self._endpoints[number].finish(now_s):
                    missing[group] -= 1
                    if not missing[group]:
                        arrivals.append((now_s, group))
                self._note(number)
        # From here on no endpoint has to do with another one.
        rest = [endpoint.rest() for endpoint in self._endpoints]
        arrivals += sorted((end_s, group) for ended in rest for group, end_s in ended.items())
        # what is before a group's first token is as long at its end
        return [(end_s + self._before_s, group) for end_s, group in arrivals]

    def _ending(self, now_s: float) -> list[int]:
        """Endpoints of which a sequence ends now; none if all that was said has changed since."""
        numbers = []
        while self._ends and self._ends[0][0] <= now_s:
            _, number, version = heapq.heappop(self._ends)
            if version == self._endpoints[number].version:
                numbers.append(number)
        return numbers

    def _most_room(self) -> int | None:
        """The endpoint with the most free places; None: none has any."""
        while self._room:
            free, number = -self._room[0][0], self._room[0][1]
            if free == self._endpoints[number].free > 0:
                return number
            heapq.heappop(self._room)  # it has changed since
        return None

    def _note(self, number: int) -> None:
        """What an endpoint's next end and its room are, now that they have changed."""
        endpoint = self._endpoints[number]
        heapq.heappush(self._room, (-endpoint.free, number))
        if (end_s := endpoint.next_end_s) is not None:
            heapq.heappush(self._ends, (end_s, number, endpoint.version))
