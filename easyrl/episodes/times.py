"""Where episodes' time goes: with the model, with the environment, in its tools."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from easyrl.episodes.session import Session
from easyrl.schema import Completion
from easyrl.timeline.spans import ACTING, EPISODE, AddSpan

Interval = tuple[float, float]  # start and end, time.monotonic()
Sums = Mapping[str, Mapping[str, float]]  # by environment, the numbers of its EnvironmentTotals


class ToolCall(Protocol):
    """A call of a tool, as its host has timed it."""

    @property
    def name(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def is_error(self) -> bool: ...


@dataclass
class EnvironmentTotals:
    """Of the episodes of one environment."""

    num_episodes: int = 0
    num_failures: int = 0
    num_truncated: int = 0
    num_turns: int = 0
    num_branches: int = 0
    num_tokens: int = 0  # sampled
    seconds: float = 0.0
    acting_s: float = 0.0  # nothing was sampled
    num_tool_calls: int = 0
    num_tool_failures: int = 0
    tool_s: float = 0.0  # calls side by side each
    num_hung_threads: int = 0  # of its hosts, now

    def add(self, sums: Mapping[str, float]) -> None:
        """Those of other episodes, by the names of these fields."""
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)

    def metrics(self) -> dict[str, float]:
        """By the last part of their names; seconds and counts are means over the episodes."""
        found = {
            "episodes": float(self.num_episodes),
            "failures": float(self.num_failures),
            "truncated": float(self.num_truncated),
        }
        if self.num_episodes:
            found |= {
                "turns": self.num_turns / self.num_episodes,
                "branches": self.num_branches / self.num_episodes,
                "tokens": self.num_tokens / self.num_episodes,
                "episode_s": self.seconds / self.num_episodes,
                "environment_s": self.acting_s / self.num_episodes,
            }
        if self.num_tool_calls:
            found |= {
                "tool_calls": self.num_tool_calls / self.num_episodes,
                "tool_failures": float(self.num_tool_failures),
                "tool_s": self.tool_s / self.num_tool_calls,
            }
        if self.num_hung_threads:
            found["hung_threads"] = float(self.num_hung_threads)
        return found


@dataclass
class EpisodeTimes:
    """Adds episodes up from one report to the next. ``taken`` may be called from any thread."""

    _totals: dict[str, EnvironmentTotals] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def add(
        self,
        environment: str,
        made: Completion,
        session: Session,
        whole: Interval,
        calls: Sequence[ToolCall],
    ) -> None:
        """An episode that has come to its end, or failed behind a turn."""
        assert made.episode is not None
        with self._lock:
            totals = self._totals.setdefault(environment, EnvironmentTotals())
            totals.num_episodes += 1
            totals.num_failures += made.episode.failure is not None
            totals.num_truncated += made.truncated
            totals.num_turns += len(made.episode.turns)
            totals.num_branches += made.episode.num_branches
            totals.num_tokens += len(made.sampled_ids)
            totals.seconds += whole[1] - whole[0]
            totals.acting_s += sum(end - start for start, end in between(whole, session.sampled_s))
            totals.num_tool_calls += len(calls)
            totals.num_tool_failures += sum(call.is_error for call in calls)
            totals.tool_s += sum(call.end_s - call.start_s for call in calls)

    def taken(self) -> dict[str, dict[str, float]]:
        """Sums of what was added since the last call, by the environment's name."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return {name: asdict(each) for name, each in totals.items()}


def environment_metrics(taken: Iterable[Sums], group: str = "") -> dict[str, float]:
    """``environment/NAME/…`` of what ranks have taken of their times, all together.

    ``group``: behind the name, for episodes that are not trained.
    """
    merged: dict[str, EnvironmentTotals] = {}
    for of_rank in taken:
        for name, sums in of_rank.items():
            merged.setdefault(name, EnvironmentTotals()).add(sums)
    return {
        f"environment/{name}/{group}{metric}": value
        for name, totals in merged.items()
        for metric, value in totals.metrics().items()
    }


def tell_spans(
    span: AddSpan,
    environment: str,
    session: Session,
    sample: int,
    whole: Interval,
    calls: Sequence[ToolCall],
) -> None:
    """The spans of an episode, or of a start of one: the whole, what of it the environment took
    between turns, and its tools."""
    index = session.prompt.index
    span(
        environment,
        EPISODE,
        *whole,
        epoch=session.prompt.epoch,
        index=index,
        sample=sample,
        turns=len(session.records),
    )
    for start_s, end_s in between(whole, session.sampled_s):
        span(environment, ACTING, start_s, end_s, index=index, sample=sample)
    for call in calls:
        start_s = min(max(call.start_s, whole[0]), whole[1])  # the host says when
        end_s = min(max(call.end_s, start_s), whole[1])
        ended = "error" if call.is_error else "answered"
        told = {"index": index, "sample": sample, "ended": ended}
        span(environment, f"tool {call.name}", start_s, end_s, **told)


def between(whole: Interval, busy: Iterable[Interval]) -> Iterator[Interval]:
    """What of ``whole`` none of ``busy`` has, which follow one another."""
    at_s, end_s = whole
    for start, end in busy:
        if start > at_s:
            yield at_s, min(start, end_s)
        at_s = max(at_s, end)
    if at_s < end_s:
        yield at_s, end_s
