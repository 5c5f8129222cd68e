"""What would shorten a batch: a run's own batches, simulated with more of one thing.

The rates are calibrated on the batches' timeline, the lengths are those of their responses in the
order of their requests. More training ranks take groups beside the others; twice the places at
endpoints take more sequences, each slower by as much as the timeline says. A simulation that is not
what the batches took advises nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from easyrl.config import Config
from easyrl.simulation.calibrate import (
    LEAST_REQUESTS,
    calibrate,
    has_episodes,
    most_in_flight,
    seconds_of,
    trained_share_of,
)
from easyrl.simulation.pipeline import simulate_batch
from easyrl.simulation.replay import lengths_of
from easyrl.simulation.setting import Setting
from easyrl.timeline.spans import (
    GROUP,
    REQUEST,
    BatchSpans,
    is_rank,
    spans_of,
    whole_batches,
)

MORE_TRAINING, MORE_INFERENCE = "training devices", "places at inference endpoints"
MORE_ENDPOINTS = "inference endpoints"
WORTH_SAYING = 0.03  # of a batch's time
MOST_OFF = 0.10  # of it, that a simulation which advises may be off
MOST_OF_IT = 0.8  # of what twice as many save: the least number that saves so much is named
MOST_BATCHES = 16  # the newest are enough
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Expected(NamedTuple):
    """A batch's seconds: what it took, simulated as it was, and with twice of one thing."""

    measured_s: float
    as_it_was_s: float
    more_training_s: float
    more_inference_s: float
    more_endpoints_s: float

    @property
    def gains(self) -> dict[str, float]:
        """The share of the batch's time that each would save."""
        return {
            MORE_TRAINING: 1 - self.more_training_s / self.as_it_was_s,
            MORE_INFERENCE: 1 - self.more_inference_s / self.as_it_was_s,
            MORE_ENDPOINTS: 1 - self.more_endpoints_s / self.as_it_was_s,
        }


class _Replay:
    """The newest batches, of all ranks together, and the setting that they are calibrated to."""

    def __init__(
        self, trained: Sequence[Sequence[BatchSpans]], mode: Literal["async", "sync"]
    ) -> None:
        groups = [_count(of_ranks, GROUP) for of_ranks in trained]
        requests = sum(_count(of_ranks, REQUEST) for of_ranks in trained)
        self._group_size = max(round(requests / sum(groups)), 1)
        self.setting = calibrate(
            trained,
            places=most_in_flight(trained),
            batch_size=statistics.mode(groups),
            group_size=self._group_size,
            mode=mode,
        ).setting
        self._lengths = [lengths_of(of_ranks, self._group_size) for of_ranks in trained]
        self._shares = [
            trained_share_of([of_ranks], self._group_size, shares_prompts=True)
            for of_ranks in trained
        ]
        self.measured_s = [seconds_of(of_ranks) for of_ranks in trained]

    def seconds(self, setting: Setting) -> list[float]:
        """Of each batch, with its own lengths and its own share of trained tokens."""
        return [
            simulate_batch(
                replace(setting, rates=replace(setting.rates, trained_share=share)), lengths
            ).step_s
            for share, lengths in zip(self._shares, self._lengths, strict=True)
        ]

    def expect(self) -> list[Expected]:
        own = self.setting
        settings = (
            own,
            replace(own, ranks=2 * own.ranks),
            replace(own, places=2 * own.places),
            replace(own, endpoints=2 * own.endpoints),
        )
        columns = [self.measured_s, *map(self.seconds, settings)]
        return [Expected(*row) for row in zip(*columns, strict=True)]

    def gain(self, setting: Setting, as_it_was_s: Sequence[float]) -> float:
        """The median share of a batch's time that ``setting`` would save."""
        pairs = zip(self.seconds(setting), as_it_was_s, strict=True)
        return statistics.median(1 - seconds / before_s for seconds, before_s in pairs)


def expect(batches: Sequence[BatchSpans], *, synchronous: bool) -> list[Expected]:
    """Of each of the newest batches, of all ranks together.

    Empty if none was trained, they have too few requests, or their samples are episodes.
    """
    replay = _replay(batches, synchronous)
    return [] if replay is None else replay.expect()


def median_gains(expected: Sequence[Expected]) -> dict[str, float]:
    """Of several batches; empty without one."""
    kinds = (MORE_TRAINING, MORE_INFERENCE, MORE_ENDPOINTS) if expected else ()
    return {kind: statistics.median(each.gains[kind] for each in expected) for kind in kinds}


def advice(
    batches: Sequence[BatchSpans], *, synchronous: bool, devices_per_rank: int | None = None
) -> str:
    """One sentence: what the batches are bound by, and what would save how much.

    ``devices_per_rank``: of a data-parallel rank; None: not known, so that ranks are named.
    """
    if has_episodes(batches):
        return (
            "samples are episodes, which are not simulated: where their time went is known, and no "
            "advice is given"
        )
    replay = _replay(batches, synchronous)
    if replay is None:
        return (
            f"the timeline has no trained batch of {LEAST_REQUESTS} requests; there is nothing to "
            "advise"
        )
    expected = replay.expect()
    off = statistics.median(each.as_it_was_s / each.measured_s - 1 for each in expected)
    if abs(off) > MOST_OFF:
        return (
            f"the simulation of these batches is {abs(off):.0%} off what they took: no advice is "
            "given"
        )
    told = _told(replay, expected, batches, devices_per_rank)
    return f"{told} (the simulation is {abs(off):.0%} off)"


def advice_of_run(batches: Sequence[BatchSpans], config: Config | None) -> str:
    """``advice`` on what a run of ``config`` has kept, without batches that lack spans."""
    return advice(
        whole_batches(batches),
        synchronous=config is not None and config.run.mode == "sync",
        devices_per_rank=None if config is None else config.parallel.ranks_per_model,
    )


def _told(
    replay: _Replay,
    expected: Sequence[Expected],
    batches: Sequence[BatchSpans],
    devices_per_rank: int | None,
) -> str:
    gains = median_gains(expected)
    own, before_s = replay.setting, [each.as_it_was_s for each in expected]
    training = "training devices" if devices_per_rank else "training ranks"
    twice = {
        training: gains[MORE_TRAINING],
        MORE_ENDPOINTS: gains[MORE_ENDPOINTS],
        "places at those there are": gains[MORE_INFERENCE],
    }
    if max(gains.values()) < WORTH_SAYING:
        waits = _waiting(batches)
        told = f"neither side holds the other up ({waits:.0%} of the time is waiting)"
        return f"{told}: {_saved([(f'twice the {name}', gain) for name, gain in twice.items()])}"
    if gains[MORE_TRAINING] >= max(gains[MORE_ENDPOINTS], gains[MORE_INFERENCE]):
        bound, named = "training-bound", training
        more, gain = _least(
            own.ranks, twice[named], lambda ranks: replay.gain(replace(own, ranks=ranks), before_s)
        )
        more *= devices_per_rank or 1
    else:
        bound, named = "inference-bound", MORE_ENDPOINTS
        more, gain = _least(
            own.endpoints,
            twice[named],
            lambda endpoints: replay.gain(replace(own, endpoints=endpoints), before_s),
        )
    del twice[named]
    number = _NUMBERS[more] if more < len(_NUMBERS) else f"{more:,}"
    name = named.removesuffix("s") if more == 1 else named
    saved = [(f"{number} more {name}", gain)]
    return f"{bound}: {_saved(saved + [(f'twice the {name}', twice[name]) for name in twice])}"


def _saved(gains: Sequence[tuple[str, float]]) -> str:
    """What each would save."""
    (what, gain), *others = [(what, f"{max(gain, 0):.0%}") for what, gain in gains]
    told = [f"{what} would save {gain} of a batch's time"]
    return ", ".join(told + [f"{what} {gain}" for what, gain in others])


def _least(there_are: int, twice_gain: float, gain_of: Callable[[int], float]) -> tuple[int, float]:
    """How many more, up to as many again, save most of what twice as many do; what they save.

    A gain grows with the number, but for the last group's wait.
    """
    low, high, gain = there_are, 2 * there_are, twice_gain  # low is too few
    while high - low > 1:
        middle = (low + high) // 2
        of_middle = gain_of(middle)
        if of_middle >= MOST_OF_IT * twice_gain:
            high, gain = middle, of_middle
        else:
            low = middle
    return high - there_are, gain


def _replay(batches: Sequence[BatchSpans], synchronous: bool) -> _Replay | None:
    """None: there is nothing to simulate."""
    by_number: dict[int, list[BatchSpans]] = {}
    for each in batches:
        by_number.setdefault(each.batch, []).append(each)
    trained = [of_ranks for _, of_ranks in sorted(by_number.items()) if _is_trained(of_ranks)]
    trained = trained[-MOST_BATCHES:]
    requests = sum(_count(of_ranks, REQUEST) for of_ranks in trained)
    if (
        requests < LEAST_REQUESTS
        or not sum(_count(of_ranks, GROUP) for of_ranks in trained)
        or has_episodes(batches)
    ):
        return None
    return _Replay(trained, "sync" if synchronous else "async")


def _is_trained(of_ranks: Sequence[BatchSpans]) -> bool:
    names = {(s.name, "num_tokens" in s.args) for s in spans_of(of_ranks) if is_rank(s.lane)}
    return ("train", True) in names and _count(of_ranks, REQUEST) > 0


def _count(of_ranks: Sequence[BatchSpans], name: str) -> int:
    return sum(span.name == name for span in spans_of(of_ranks))


def _waiting(batches: Sequence[BatchSpans]) -> float:
    """The share of the trainers' time in which they wait for groups."""
    total_s = sum(batch.end_s - batch.start_s for batch in batches)
    waits_s = sum(
        span.seconds
        for batch in batches
        for span in batch.spans
        if is_rank(span.lane) and span.name == "wait"
    )
    return waits_s / total_s if total_s else 0.0
