"""Which groups of a step are kept: the worst, the best, and others drawn by a hash."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

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
    means: dict[Key, float | None] = field(default_factory=dict)  # rewards of these
    why: dict[Key, Why] = field(default_factory=dict)
    # the trainer's log-probabilities minus the endpoint's; not of what was not compared
    compared: dict[SampleKey, ResponseDifference] = field(default_factory=dict)
    seconds: float = 0.0  # that choosing and comparing took

    def add(self, groups: Iterable[TrainedGroup]) -> None:
        """Lets go at once what is not chosen."""
        if self.most:
            with self._timed():
                for trained in groups:
                    key = trained.group.prompt.key
                    self.groups[key], self.means[key] = trained, _mean(trained)
                self._keep(choose(self.means, self.most))

    def told(self) -> list[Any]:
        """What the other ranks have to know of this one's, for JSON."""
        return [(*key, mean) for key, mean in self.means.items()]

    def among(self, ranks: Sequence[list[Any]]) -> ChosenGroups:
        """Those that are chosen also of what all ranks have ``told``."""
        if self.most:
            with self._timed():
                means = {(epoch, index): mean for rank in ranks for epoch, index, mean in rank}
                self._keep(choose(means, self.most))
        return self

    def compare(self, responses: Iterable[ResponseDifference]) -> None:
        """Notes what was compared of responses whose groups were added and are kept so far."""
        if self.groups:
            with self._timed():
                self.compared |= {
                    each.key: each
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
        self.means = {key: self.means[key] for key in self.groups}
        self.why = {key: chosen[key] for key in self.groups}
        self.compared = {
            key: own for key, own in self.compared.items() if (key.epoch, key.prompt) in self.groups
        }


def _mean(trained: TrainedGroup) -> float | None:
    """Of the group's rewards; None where it was not scored."""
    rewards = [score.reward for score in trained.group.scores]
    mean = float(sum(rewards)) / len(rewards) if rewards else math.nan
    return mean if math.isfinite(mean) else None


@lru_cache(maxsize=1024)  # asked for with each group that arrives
def _drawn(key: Key) -> bytes:
    return blake3(b"%d:%d" % key).digest(8)
