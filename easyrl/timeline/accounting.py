"""Where each lane's time of a batch went: disjoint causes, work among them, that add up to it.

The time of a batch is from its first phase to the first phase of the next one. A rank's causes are
the phases of its trainer thread; waiting is told apart by whether training had begun. An endpoint's
are found from its requests: what was running at each moment, and where nothing was, what it can be
seen to wait for (``reasons``). What has no span and no reason is ``unexplained``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from easyrl.timeline.reasons import (
    AT_BORDER,
    AT_WORK,
    BEGINNING,
    ELSEWHERE,
    IN_QUEUE,
    SCORING,
    UNSENT,
    reasons_by_lane,
)
from easyrl.timeline.spans import (
    ACTING,
    EVALUATION,
    FAILED,
    REQUEST,
    UPDATES,
    BatchSpans,
    Span,
    by_lane,
    is_endpoint,
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
# Of an endpoint at which nothing runs:
BORDER = "idle: border"  # a trainer begins the batch, or is between this one and the next
NO_PROMPT = "idle: no prompt left"  # others have all that may be drawn, and it is asked again later
OTHERS_TAIL = "idle: others' tail"  # it is done, and others still generate
REWARDS = "idle: rewards"  # all that was asked is answered, and some of it is being scored
ENVIRONMENTS = "idle: environments"  # an episode's environment is at work
# The batch is answered, and a trainer is at work, or has groups to take:
TRAINING = "idle: training"
IDLE = frozenset({BORDER, NO_PROMPT, OTHERS_TAIL, REWARDS, ENVIRONMENTS, TRAINING})
NOT_RECORDED = "not recorded"  # nothing is seen, in a batch of which spans were left out
_PHASE_NAMES = {"other": UNEXPLAINED}
_moment = itemgetter(0)


class LaneAccount(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of one lane in one batch, by cause; they add up to ``wall_s``."""

    lane: str
    batch: int
    wall_s: float
    causes: dict[str, float]
    left_out: int = 0  # spans of the batch that were not kept, of an endpoint's lane

    @property
    def unexplained_s(self) -> float:
        return self.causes.get(UNEXPLAINED, 0.0) + self.causes.get(NOT_RECORDED, 0.0)

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
    left_out = sum(each.left_out for each in of_ranks)
    lanes = by_lane(spans)
    reasons = reasons_by_lane(lanes, whole.end_s)
    answered_s = max(
        (
            span.end_s
            for lane, of_lane in lanes.items()
            if is_endpoint(lane)
            for span in of_lane
            if span.name in (REQUEST, FAILED)
        ),
        default=whole.start_s,
    )
    accounts = []
    for lane, of_lane in lanes.items():
        if is_rank(lane):
            window = own.get(lane, whole)
            causes, not_kept = _of_rank(of_lane, window), 0
        elif is_endpoint(lane):
            window, not_kept = whole, left_out
            causes = _of_endpoint(of_lane, reasons[lane], whole, answered_s)
            if left_out:
                causes = _as_seen(causes)
        else:
            continue
        seconds = window.end_s - window.start_s
        accounts.append(LaneAccount(lane, of_ranks[0].batch, seconds, causes, not_kept))
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


def most_unexplained(accounts: Iterable[LaneAccount]) -> float:
    """The largest share of a lane's time, over all its batches, that is unexplained."""
    lanes = defaultdict[str, list[LaneAccount]](list)
    for each in accounts:
        lanes[each.lane].append(each)
    shares = (
        sum(each.unexplained_s for each in own) / sum(each.wall_s for each in own)
        for own in lanes.values()
    )
    return max(shares, default=0.0)


def with_causes(spans: Iterable[Span]) -> Iterator[tuple[Span, str]]:
    """The phases of a rank in one batch, in order, and the cause that each one's time has."""
    has_trained = False
    for span in spans:
        has_trained |= span.name == "train"
        name = _PHASE_NAMES.get(span.name, span.name)
        if span.name == "wait":
            name = STARVED if has_trained else FIRST_GROUP
        yield span, name


def _of_rank(spans: Sequence[Span], window: _Window) -> dict[str, float]:
    causes = defaultdict[str, float](float)
    for span, cause in with_causes(spans):
        causes[cause] += _within(span, window)
    seconds = window.end_s - window.start_s
    causes[UNEXPLAINED] += seconds - sum(causes.values())
    return dict(causes)


def _of_endpoint(
    spans: Sequence[Span], reasons: Sequence[Span], window: _Window, answered_s: float
) -> dict[str, float]:
    """``answered_s``: when the batch's last request ends, at whatever endpoint."""
    asked = [span for span in spans if span.name in (REQUEST, FAILED) and _within(span, window)]
    first_s = min((span.start_s for span in asked), default=window.end_s)
    last_s = max((span.start_s for span in asked if span.name == REQUEST), default=window.start_s)
    done_s = max((span.end_s for span in asked), default=window.end_s)
    causes = defaultdict[str, float](float)
    more = [first_s, last_s, done_s, answered_s]
    most = max((running[REQUEST] for _, _, running in _moments(asked, window)), default=0)
    has_failed = False  # what ended last here
    for start_s, end_s, running in _moments([*spans, *reasons], window, more):
        if running[REQUEST] or running[FAILED]:
            has_failed = not running[REQUEST]
        if running[REQUEST]:
            cause = GENERATING if end_s <= last_s or running[REQUEST] == most else TAIL
        elif (update := next((name for name in UPDATES if running[name]), None)) is not None:
            cause = update
        elif running[EVALUATION]:
            cause = EVALUATION
        elif running[FAILED]:
            cause = FAILING
        elif running[ACTING]:
            cause = ENVIRONMENTS
        elif has_failed and end_s <= answered_s:
            cause = FAILING
        elif end_s <= first_s and running[BEGINNING]:
            cause = BORDER
        elif end_s <= answered_s:
            cause = _before_the_last_answer(running, is_done=start_s >= done_s)
        else:
            cause = _after_the_last_answer(running)
        causes[cause] += end_s - start_s
    return dict(causes)


def _before_the_last_answer(running: Mapping[str, int], *, is_done: bool) -> str:
    """Of an endpoint at which nothing runs, while the batch's requests are not all answered."""
    if running[UNSENT]:  # whatever else goes on, this could have been here
        return UNEXPLAINED
    if running[ELSEWHERE]:
        return OTHERS_TAIL if is_done else NO_PROMPT
    return REWARDS if running[SCORING] else UNEXPLAINED


def _after_the_last_answer(running: Mapping[str, int]) -> str:
    if running[AT_WORK]:
        return TRAINING
    if running[AT_BORDER]:
        return BORDER
    if running[SCORING]:
        return REWARDS
    return TRAINING if running[IN_QUEUE] else UNEXPLAINED


def _as_seen(causes: Mapping[str, float]) -> dict[str, float]:
    """What may have been a request that was left out is no idle time."""
    found = defaultdict[str, float](float)
    for cause, seconds in causes.items():
        found[NOT_RECORDED if cause in IDLE | {UNEXPLAINED, FAILING} else cause] += seconds
    return dict(found)


def _moments(
    spans: Sequence[Span], window: _Window, more: Sequence[float] = ()
) -> Iterator[tuple[float, float, dict[str, int]]]:
    """Start and end of each stretch in which nothing begins or ends, and what runs, by name: until
    the next one is asked for.

    ``more``: moments, seconds, that a stretch must not contain.
    """
    changes = list[tuple[float, str, int]]()
    running = defaultdict[str, int](int)
    first_s, last_s = window
    for span in spans:
        start_s, end_s = max(span.start_s, first_s), min(span.end_s, last_s)
        if end_s > start_s:
            changes += (start_s, span.name, 1), (end_s, span.name, -1)
    changes += ((moment, "", 0) for moment in (*more, last_s) if first_s <= moment <= last_s)
    changes.sort(key=_moment)
    before_s = first_s
    for moment, name, change in changes:
        if moment > before_s:
            yield before_s, moment, running
            before_s = moment
        running[name] += change


def _within(span: Span, window: _Window) -> float:
    """Seconds of ``span`` inside ``window``."""
    return max(0.0, min(span.end_s, window.end_s) - max(span.start_s, window.start_s))
