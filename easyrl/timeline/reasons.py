"""What an endpoint without a request can be seen to wait for, found from the other lanes.

Each reason is a set of times. A span that stands for one has the reason as its name and lies in the
lane of whoever has it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from easyrl.timeline.spans import (
    ACTING,
    GROUP,
    GROUP_REWARD,
    QUEUED,
    REQUEST,
    REWARD,
    Span,
    is_endpoint,
    is_environment,
    is_producer,
    is_rank,
)

ELSEWHERE = "request elsewhere"  # another endpoint answers the batch's requests
SCORING = "scoring"  # a reward runs, or waits for a worker
BEGINNING = "beginning"  # a trainer asks for the batch
AT_WORK = "trainer at work"  # with what was generated
AT_BORDER = "trainer between batches"  # weights, certificate, reports
IN_QUEUE = "group in the queue"  # finished, and the trainer has yet to take it
# A prompt may be drawn, and no endpoint has its first request. Not a reason to be idle.
UNSENT = "prompt not sent"

_AT_WORK = frozenset({"pack", "train", "look_ahead", "ranks", "evaluation", "check", "step"})
_NO_WORK = frozenset({"wait", "other"})
_start_s = attrgetter("start_s")


def reasons_by_lane(lanes: Mapping[str, Sequence[Span]], end_s: float) -> dict[str, list[Span]]:
    """For each endpoint of a batch that ends at ``end_s``: the times of each reason.

    ``lanes``: the batch's spans (``by_lane``).
    """
    phases = _of(lanes, is_rank)
    producers = _of(lanes, is_producer)
    of_all = [
        *_together(ACTING, (s for s in _of(lanes, is_environment) if s.name == ACTING)),
        *_together(SCORING, (s for s in producers if s.name in (REWARD, GROUP_REWARD))),
        *_together(IN_QUEUE, (s for s in producers if s.name == QUEUED)),
        *_together(BEGINNING, (s for s in phases if s.name == "begin")),
        *_together(AT_WORK, (s for s in phases if s.name in _AT_WORK)),
        *_together(AT_BORDER, (s for s in phases if s.name not in _AT_WORK | _NO_WORK)),
        *_unsent(producers, min((own[0].start_s for own in lanes.values()), default=0.0), end_s),
    ]
    asked = {
        lane: [span for span in own if span.name == REQUEST]
        for lane, own in lanes.items()
        if is_endpoint(lane)
    }
    if len(asked) == 1:
        return {lane: of_all for lane in asked}
    busy = {lane: _together(ELSEWHERE, requests) for lane, requests in asked.items()}
    return {
        lane: [*of_all, *_together(ELSEWHERE, _of_others(busy, lane))] for lane in sorted(asked)
    }


def _of(lanes: Mapping[str, Sequence[Span]], is_one: Callable[[str], bool]) -> list[Span]:
    """The spans of those lanes."""
    return [span for lane, own in lanes.items() if is_one(lane) for span in own]


def _of_others(busy: Mapping[str, Sequence[Span]], lane: str) -> Iterable[Span]:
    return (span for other, spans in busy.items() if other != lane for span in spans)


def _unsent(producers: Sequence[Span], first_s: float, end_s: float) -> list[Span]:
    """When a prompt could have been sent and was not: fewer groups have begun than may be drawn.

    What may be drawn from ``first_s`` on is as many as were trained, and one more for each that was
    rejected.
    """
    groups = [span for span in producers if span.name == GROUP]
    trained = {_key(span) for span in producers if span.name == QUEUED}
    changes = defaultdict[float, int](int)  # of the number of prompts that may be drawn
    for group in groups:
        changes[first_s if _key(group) in trained else group.end_s] += 1
        changes[group.start_s] -= 1
    unsent: list[Span] = []
    count, since_s = 0, None
    for moment in sorted(changes):
        count += changes[moment]
        if count > 0 and since_s is None:
            since_s = moment
        elif count <= 0 and since_s is not None:
            unsent.append(Span("", UNSENT, since_s, moment))
            since_s = None
    if since_s is not None:
        unsent.append(Span("", UNSENT, since_s, max(end_s, since_s)))
    return unsent


def _key(span: Span) -> tuple[int | str | None, int | str | None]:
    return span.args.get("epoch"), span.args.get("index")


def _together(name: str, spans: Iterable[Span]) -> list[Span]:
    """The times in which one of ``spans`` runs, each once."""
    times: list[Span] = []
    lane, start_s, end_s = "", 0.0, -math.inf  # of the last one
    for span in sorted(spans, key=_start_s):
        if span.start_s > end_s:
            if end_s > -math.inf:
                times.append(Span(lane, name, start_s, end_s))
            lane, start_s, end_s = span.lane, span.start_s, span.end_s
        elif span.end_s > end_s:
            end_s = span.end_s
    if end_s > -math.inf:
        times.append(Span(lane, name, start_s, end_s))
    return times
