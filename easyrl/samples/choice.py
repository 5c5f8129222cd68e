"""Which groups of a step are kept: the worst, the best, and others drawn by a hash."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from easyrl.engines.base import ResponseDifference
from easyrl.schema import Key, SampleKey, TrainedGroup

Why = Literal["worst", "best", "drawn"]


def choose(means: Mapping[Key, float | None], most: int) -> dict[Key, Why]:
    """At most ``most`` of the groups whose mean rewards are given, and why each is kept.

    The worst first, then the best, then in the order of a hash. Whoever is chosen of all groups is
    chosen of any part that it belongs to: so groups can come one by one, in any order, on any rank.
    """
    in_order = sorted(means, key=_drawn)  # decides between equal rewards, too
    scored = {key: mean for key in in_order if (mean := means[key]) is not None}
    chosen: dict[Key, Why] = {}
    if scored and most:
        chosen[min(scored, key=scored.__getitem__)] = "worst"
    if scored and most > 1:
        chosen.setdefault(max(scored, key=scored.__getitem__), "best")
    for key in in_order:
        if len(chosen) >= most:
            break
        chosen.setdefault(key, "drawn")
    return chosen


@dataclass
class ChosenGroups:
    """Those of one optimizer step's groups that are kept, of as many as were seen."""

    most: int = 0  # of all ranks; 0: none
    groups: dict[Key, TrainedGroup] = field(default_factory=dict)  # of this rank
    why: dict[Key, Why] = field(default_factory=dict)
    # mean of the trainer's log-probabilities minus the endpoint's; not of what was not compared
    logprob_diff: dict[SampleKey, float] = field(default_factory=dict)
    seconds: float = 0.0  # that choosing and comparing took

    def add(self, groups: Iterable[TrainedGroup]) -> None:
        """Lets go at once what is not chosen."""
        if self.most:
            with self._timed():
                self.groups |= {trained.group.prompt.key: trained for trained in groups}
                self._keep(choose({key: _mean(own) for key, own in self.groups.items()}, self.most))

    def told(self) -> list[Any]:
        """What the other ranks have to know of this one's, for JSON."""
        return [(*key, _mean(trained)) for key, trained in self.groups.items()]

    def among(self, ranks: Sequence[list[Any]]) -> ChosenGroups:
        """Those that are chosen also of what all ranks have ``told``."""
        if self.most:
            with self._timed():
                means = {(epoch, index): mean for rank in ranks for epoch, index, mean in rank}
                self._keep(choose(means, self.most))
        return self

    def compare(self, responses: Iterable[ResponseDifference]) -> None:
        """Notes what was compared of the responses that are kept."""
        if self.groups:
            with self._timed():
                self.logprob_diff |= {
                    each.key: each.d / each.num
                    for each in responses
                    if each.num and (each.key.epoch, each.key.prompt) in self.groups
                }

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def _keep(self, chosen: Mapping[Key, Why]) -> None:
        self.groups = {key: own for key, own in self.groups.items() if key in chosen}
        self.why = {key: chosen[key] for key in self.groups}


def _mean(trained: TrainedGroup) -> float | None:
    """Of the group's rewards; None where it was not scored."""
    if not trained.group.scores:
        return None
    mean = float(np.mean([score.reward for score in trained.group.scores]))
    return mean if np.isfinite(mean) else None


def _drawn(key: Key) -> bytes:
    return blake3(b"%d:%d" % key).digest(8)
