"""Discrete-event simulation of a batch: endpoints that share their speed, ranks that take groups.

Groups are dispatched in order, each to the endpoint with the most free places, when it has one; its
samples are decoded beside whatever else is there, all at the same speed. A finished group waits for
a rank, which trains it; when all are trained the border follows. In a synchronous run ranks begin
when all groups are there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import simpy

from easyrl.simulation.setting import Outcome, Rates, Setting

NUM_DRAWS = 8
Process = Generator[simpy.Event, Any, None]


def simulate(setting: Setting, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> Outcome:
    """The mean batch of ``setting``, over ``num_draws`` draws of lengths."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(num_draws):
        lengths = setting.lengths.draw(setting.batch_size, setting.group_size, rng)
        batches.append(simulate_batch(setting, lengths))
    return Outcome(*(float(np.mean(column)) for column in zip(*map(astuple, batches), strict=True)))


def simulate_batch(setting: Setting, lengths: np.ndarray) -> Outcome:
    """One batch. ``lengths``: int [B, G], tokens of each response, in the order of dispatch."""
    batch = _Batch(setting, lengths)
    batch.run()
    return batch.outcome()


@dataclass(order=True)
class _Sequence:
    """A response that is being decoded."""

    end: float  # in tokens of a sequence that would have been there from the start
    number: int
    done: simpy.Event = field(compare=False)


class _Endpoint:
    """Decodes up to ``places`` sequences, one token of each at a time.

    ``made`` is how many tokens a sequence would have that was there from the start; it grows at the
    same speed for all, so only the next end has to be known.
    """

    def __init__(self, env: simpy.Environment, rates: Rates, places: int) -> None:
        self.places = places
        self._env, self._rates = env, rates
        self._running: list[_Sequence] = []
        self._numbers = itertools.count()
        self._made, self._since_s = 0.0, 0.0
        self._changed = env.event()
        self.waiting: list[tuple[int, simpy.Event]] = []  # tokens, and who is told of the end
        self.busy_places_s = 0.0
        env.process(self._decode())

    @property
    def free(self) -> int:
        return self.places - len(self._running) - len(self.waiting)

    def add(self, num_tokens: int) -> simpy.Event:
        """A sequence; the event happens when it is finished."""
        done = self._env.event()
        self.waiting.append((num_tokens, done))
        self._admit()
        return done

    def _admit(self) -> None:
        self._pass()
        admitted = False
        while self.waiting and len(self._running) < self.places:
            num_tokens, done = self.waiting.pop(0)
            sequence = _Sequence(self._made + num_tokens, next(self._numbers), done)
            heapq.heappush(self._running, sequence)
            admitted = True
        if admitted and not self._changed.triggered:
            self._changed.succeed()

    def _token_s(self) -> float:
        return self._rates.decode_step_s + len(self._running) * self._rates.decode_each_s

    def _pass(self) -> None:
        """Counts what was decoded since the last look."""
        passed_s = self._env.now - self._since_s
        if self._running and passed_s:
            self._made += passed_s / self._token_s()
            self.busy_places_s += passed_s * len(self._running)
        self._since_s = self._env.now

    def _decode(self) -> Process:
        while True:
            self._changed = self._env.event()
            if not self._running:
                yield self._changed
                continue
            left_s = max(self._running[0].end - self._made, 0.0) * self._token_s()
            finished = self._env.timeout(left_s)
            yield self._changed | finished
            self._pass()
            if finished.processed:
                self._made = max(self._made, self._running[0].end)  # no rounding behind the comma
            while self._running and self._running[0].end <= self._made:
                heapq.heappop(self._running).done.succeed()
            self._admit()


class _Batch:
    """A batch on its way through endpoints and ranks."""

    def __init__(self, setting: Setting, lengths: np.ndarray) -> None:
        self.env = simpy.Environment()
        self._setting, self._lengths = setting, lengths
        self._endpoints = [
            _Endpoint(self.env, setting.rates, setting.places) for _ in range(setting.endpoints)
        ]
        self._ready: simpy.Store = simpy.Store(self.env)
        self._all_here = self.env.event()
        self._freed = self.env.event()
        self._room = [(-setting.places, number) for number in range(setting.endpoints)]  # a heap
        self._arrivals: list[float] = []
        self._trained_s: list[float] = []
        self._work_s = 0.0

    def run(self) -> None:
        self.env.process(self._dispatch())
        self.env.run(self.env.all_of(self._rank_processes()))

    def outcome(self) -> Outcome:
        setting = self._setting
        end_s = max(self._trained_s) + setting.rates.border_s
        busy_s = sum(endpoint.busy_places_s for endpoint in self._endpoints)
        prompts = setting.prompt_tokens * self._lengths.size
        return Outcome(
            step_s=end_s,
            first_group_s=self._arrivals[0],
            last_group_s=self._arrivals[-1],
            tokens=float(self._lengths.sum() + prompts),
            training_idle=1 - self._work_s / (end_s * setting.ranks),
            inference_idle=1 - busy_s / (end_s * setting.endpoints * setting.places),
        )

    def _dispatch(self) -> Process:
        for group in self._lengths:
            while (number := self._most_room()) is None:
                self._freed = self.env.event()
                yield self._freed
            self.env.process(self._generate(number, group))
            yield self.env.timeout(0)  # its samples are there when the next one looks for room

    def _most_room(self) -> int | None:
        """The endpoint with the most free places; None: none has any."""
        while self._room:
            free, number = -self._room[0][0], self._room[0][1]
            if free == self._endpoints[number].free > 0:
                return number
            heapq.heappop(self._room)  # it has changed since
        return None

    def _note_room(self, number: int) -> None:
        heapq.heappush(self._room, (-self._endpoints[number].free, number))

    def _generate(self, number: int, group: Sequence[int]) -> Process:
        rates, endpoint = self._setting.rates, self._endpoints[number]
        samples = [endpoint.add(int(tokens)) for tokens in group]
        self._note_room(number)

        def freed(_: simpy.Event) -> None:
            self._note_room(number)
            if not self._freed.triggered:
                self._freed.succeed()

        for sample in samples:
            assert sample.callbacks is not None
            sample.callbacks.append(freed)
        yield self.env.all_of(samples)
        before_s = rates.request_s + rates.prefill_s * self._setting.prompt_tokens
        if before_s:  # before its first token; it is as long at the end
            yield self.env.timeout(before_s)
        self._arrivals.append(self.env.now)
        self._ready.put(int(sum(group)))
        if len(self._arrivals) == len(self._lengths):
            self._all_here.succeed()

    def _rank_processes(self) -> list[simpy.Process]:
        """Ranks take finished groups as they come, whoever is free first."""
        num_groups, taken = len(self._lengths), itertools.count()
        num_ranks = self._setting.ranks
        return [self.env.process(self._train(taken, num_groups)) for _ in range(num_ranks)]

    def _train(self, taken: Iterator[int], num_groups: int) -> Process:
        setting, rates = self._setting, self._setting.rates
        if setting.mode == "sync":
            yield self._all_here
        while next(taken) < num_groups:
            response_tokens = yield self._ready.get()
            packed = (setting.prompt_tokens + response_tokens) * rates.trained_share
            work_s = packed * rates.train_token_s + rates.train_group_s
            yield self.env.timeout(work_s)
            self._work_s += work_s
            self._trained_s.append(self.env.now)
