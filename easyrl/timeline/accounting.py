"""Where each lane's time of a batch went: disjoint causes, work among them, that add up to it.

The time of a batch is from its first phase to the first phase of the next one. A rank's causes are
the phases of its trainer thread; waiting is told apart by whether training had begun. An endpoint's
are found from its requests: what was running at each moment, and where nothing was, what it was
waiting for. What no span explains is ``unexplained``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from easyrl.timeline.spans import (
    ACTING,
    EVALUATION,
    FAILED,
    REQUEST,
    BatchSpans,
    Span,
    by_lane,
    is_endpoint,
    is_environment,
    is_rank,
    rank_lane,
    spans_of,
)

# Of a rank's lane, beside the phases themselves:
FIRST_GROUP, STARVED = "first group", "starved"  # waiting before and after training has begun
UNEXPLAINED = "unexplained"
# Of an endpoint's lane, beside push, proof and canary, and evaluation where only its requests run:
# Training's requests run, and more of them are to come, or as many run as ever did in this batch:
GENERATING = "generating"
TAIL = "tail"  # training's requests run, and the places of those that have ended stay empty
# Nothing but requests that fail; or nothing at all since one has, and it is set aside meanwhile:
FAILING = "failed"
BORDER = "idle: border"  # nothing has been asked of it yet in this batch
BETWEEN = "idle: nothing sent"  # between requests
ENVIRONMENTS = "idle: environments"  # nothing runs, and an episode's environment is at work
TRAINING = "idle: training"  # all is answered, and the trainer is not done
IDLE = frozenset({BORDER, BETWEEN, ENVIRONMENTS, TRAINING})
_UPDATES = ("probe", "push", "proof", "canary")  # of an endpoint's weights, what goes first first
_PHASE_NAMES = {"other": UNEXPLAINED}


class LaneAccount(msgspec.Struct, frozen=True):
    """Seconds of one lane in one batch, by cause; they add up to ``wall_s``."""

    lane: str
    batch: int
    wall_s: float
    causes: dict[str, float]

    @property
    def unexplained_s(self) -> float:
        return self.causes.get(UNEXPLAINED, 0.0)

    @property
    def idle_s(self) -> float:
        """In which the lane waited for others."""
        waits = IDLE | {FIRST_GROUP, STARVED}
        return sum(seconds for cause, seconds in self.causes.items() if cause in waits)


class _Window(NamedTuple):
    start_s: float
    end_s: float


def account(of_ranks: Sequence[BatchSpans]) -> list[LaneAccount]:
    """The accounts of one batch's lanes: each rank, then each endpoint.

    ``of_ranks``: what each rank has recorded of it. Endpoints are accounted for from the first
    rank's first phase to the last rank's end.
    """
    if not of_ranks:
        return []
    spans = spans_of(of_ranks)
    own = {rank_lane(each.rank): _Window(each.start_s, each.end_s) for each in of_ranks}
    whole = _Window(
        min(window.start_s for window in own.values()), max(window.end_s for window in own.values())
    )
    answered_s = max(
        (s.end_s for s in spans if is_endpoint(s.lane) and s.name in (REQUEST, FAILED)),
        default=whole.start_s,
    )
    trained_s = max(
        (span.end_s for span in spans if is_rank(span.lane) and span.name in ("train", "step")),
        default=whole.end_s,
    )
    acting = _together(s for s in spans if is_environment(s.lane) and s.name == ACTING)
    accounts = []
    for lane, of_lane in by_lane(spans).items():
        if is_rank(lane):
            window = own.get(lane, whole)
            causes = _of_rank(of_lane, window)
        elif is_endpoint(lane):
            window = whole
            causes = _of_endpoint([*of_lane, *acting], whole, answered_s, trained_s)
        else:
            continue
        seconds = window.end_s - window.start_s
        accounts.append(LaneAccount(lane, of_ranks[0].batch, seconds, causes))
    return accounts


def mean_shares(accounts: Iterable[LaneAccount]) -> dict[str, float]:
    """The share of each cause in the time of ``accounts`` together, the largest first."""
    total_s, causes = 0.0, defaultdict[str, float](float)
    for each in accounts:
        total_s += each.wall_s
        for cause, seconds in each.causes.items():
            causes[cause] += seconds
    shares = {cause: seconds / total_s for cause, seconds in causes.items() if total_s}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _of_rank(spans: Sequence[Span], window: _Window) -> dict[str, float]:
    causes = defaultdict[str, float](float)
    has_trained = False
    for span in spans:
        has_trained |= span.name == "train"
        name = _PHASE_NAMES.get(span.name, span.name)
        if span.name == "wait":
            name = STARVED if has_trained else FIRST_GROUP
        causes[name] += _within(span, window)
    seconds = window.end_s - window.start_s
    causes[UNEXPLAINED] += seconds - sum(causes.values())
    return dict(causes)


def _of_endpoint(
    spans: Sequence[Span], window: _Window, answered_s: float, trained_s: float
) -> dict[str, float]:
    """``answered_s``: when the batch's last request ends, at whatever endpoint."""
    asked = [span for span in spans if span.name in (REQUEST, FAILED) and _within(span, window)]
    first_s = min((span.start_s for span in asked), default=window.end_s)
    last_s = max((span.start_s for span in asked if span.name == REQUEST), default=window.start_s)
    done_s = max((span.end_s for span in asked), default=window.start_s)
    causes = defaultdict[str, float](float)
    more = [first_s, last_s, done_s, answered_s, trained_s]
    moments = [(start, end, now.copy()) for start, end, now in _moments(spans, window, more)]
    most = max((running[REQUEST] for _, _, running in moments), default=0)
    has_failed = False  # what ended last here
    for start_s, end_s, running in moments:
        if running[REQUEST] or running[FAILED]:
            has_failed = not running[REQUEST]
        update = next((name for name in _UPDATES if running[name]), None)
        if running[REQUEST]:
            cause = GENERATING if end_s <= last_s or running[REQUEST] == most else TAIL
        elif update is not None:
            cause = update
        elif running[EVALUATION]:
            cause = EVALUATION
        elif running[FAILED]:
            cause = FAILING
        elif running[ACTING]:
            cause = ENVIRONMENTS
        elif has_failed and end_s <= answered_s:
            cause = FAILING
        elif end_s <= first_s:
            cause = BORDER
        elif end_s <= done_s:
            cause = BETWEEN
        else:
            cause = TRAINING if end_s <= trained_s else BORDER
        causes[cause] += end_s - start_s
    return dict(causes)


def _together(spans: Iterable[Span]) -> list[Span]:
    """The times in which one of ``spans`` runs, each once."""
    times: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        if times and span.start_s <= times[-1].end_s:
            end_s = max(times[-1].end_s, span.end_s)
            times[-1] = Span(span.lane, span.name, times[-1].start_s, end_s)
        else:
            times.append(span)
    return times


def _moments(
    spans: Sequence[Span], window: _Window, more: Sequence[float]
) -> Iterator[tuple[float, float, dict[str, int]]]:
    """Start and end of each stretch in which nothing begins or ends, and what runs, by name.

    ``more``: moments, seconds, that a stretch must not contain.
    """
    changes = defaultdict[float, list[tuple[str, int]]](list)
    running = defaultdict[str, int](int)
    for span in spans:
        if not _within(span, window):
            continue
        changes[max(span.start_s, window.start_s)].append((span.name, 1))
        changes[min(span.end_s, window.end_s)].append((span.name, -1))
    for moment in (*more, window.end_s):
        if window.start_s <= moment <= window.end_s:
            changes[moment].extend(())
    before_s = window.start_s
    for moment in sorted(changes):
        if moment > before_s:
            yield before_s, moment, running
        for name, change in changes[moment]:
            running[name] += change
        before_s = moment


def _within(span: Span, window: _Window) -> float:
    """Seconds of ``span`` inside ``window``."""
    return max(0.0, min(span.end_s, window.end_s) - max(span.start_s, window.start_s))
