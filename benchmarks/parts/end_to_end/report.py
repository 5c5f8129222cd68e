"""A workload's comparison: medians over pairs, ratios, bounds, and whether both did the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.parts.end_to_end.bound import arrival_beside_s, arrival_s, beside_s, shared_s
from benchmarks.parts.end_to_end.rows import PHASE, Row, Step
from benchmarks.parts.end_to_end.workloads import Workload

FAR_OFF = 4.0  # standard errors: five workloads make some thirty comparisons
LEARNT = 0.5  # of what the other side has learnt, at least
ALLOWING = {  # by which key of the last line a ratio is allowed
    "bound_s": "with a core each",
    "bound_shared_s": "with both cores shared",
    "bound_beside_s": "each as slow as beside the other",
    "arrival_estimate_s": "as groups arrive (an estimate)",
    "arrival_beside_s": "as groups arrive, each as slow as beside the other (an estimate)",
}

MEASURES: dict[str, Callable[[Step], float]] = {
    "reward": lambda step: step.reward,
    "response tokens": lambda step: step.response_tokens,
}


@dataclass(frozen=True)
class Agreement:
    """Whether a measure is the same on both sides.

    Attributes:
        is_same: as far as these runs can tell.
    """

    measure: str
    ours: float
    theirs: float
    apart: str
    is_same: bool

    def __str__(self) -> str:
        verdict = "the same work" if self.is_same else "NOT THE SAME WORK"
        return f"ours {self.ours:.3f}, TRL {self.theirs:.3f}: {self.apart}: {verdict}"


@dataclass(frozen=True)
class Comparison:
    """All runs of one workload.

    Attributes:
        ours: a run for each pair.
        trl: by threads, a run for each pair; without any where only ours was measured.
        bounds: of each of our runs.
        before: ours by an earlier revision; without any where that was not asked for.
        untrained: log-probability of the held-out texts before training; None: not measured.
    """

    work: Workload
    ours: Sequence[Row]
    trl: Mapping[int, Sequence[Row]]
    bounds: Sequence[Row]
    before: Sequence[Row] = ()
    untrained: float | None = None

    @property
    def fastest_trl(self) -> int:
        """Threads on one machine."""
        return min(self.trl, key=lambda num_threads: _median(self.trl[num_threads]))

    @property
    def is_same_work(self) -> bool:
        """Of all of TRL's sides."""
        return all(each.is_same for n in self.trl for each in self.agreements(n))

    @property
    def is_bound_kept(self) -> bool:
        """Whether ours is no faster than what nothing can beat.

        With a core for each phase something can: training on both, once the server rests.
        """
        return _median(self.bounds, shared_s) <= _median(self.ours)

    @property
    def is_arrival_kept(self) -> bool:
        """Whether ours is no faster than the estimate for groups trained as they arrive."""
        estimate_s = self._of_bounds(arrival_s)
        return estimate_s is None or estimate_s <= _median(self.ours)

    @property
    def revisions(self) -> list[str]:
        """Of all rows that are compared."""
        return sorted({row.key.revision for rows in self._sides.values() for row in rows})

    @property
    def took_turns(self) -> bool:
        """Whether the sides of each pair are of one revision, so that they can have."""
        return all(
            len({row.key.revision for row in pair}) == 1
            for pair in zip(*self._sides.values(), strict=True)
        )

    def row(self) -> dict[str, str | float | bool]:
        """Of the last line: seconds per step, ratios, and whose rows they are of."""
        ours_s, bound_s = _median(self.ours), _median(self.bounds)
        ratios = {"ours_s": ours_s}
        if self.trl:
            trl_s, one_thread_s = _median(self.trl[self.fastest_trl]), _median(self.trl[1])
            ratios |= {
                "trl_s": trl_s,
                "trl_one_thread_s": one_thread_s,
                "one_machine": trl_s / ours_s,
                "separate_devices": one_thread_s / ours_s,
            }
        ratios |= {"bound_s": bound_s, "efficiency": bound_s / ours_s}
        ratios["bound_shared_s"] = _median(self.bounds, shared_s)
        more = {
            "bound_beside_s": beside_s,
            "arrival_estimate_s": arrival_s,
            "arrival_beside_s": arrival_beside_s,
        }
        for name, of_step in more.items():
            if (seconds := self._of_bounds(of_step)) is not None:
                ratios[name] = seconds
        if self.before:
            before_s = _median(self.before)
            ratios |= {"before_s": before_s, "of_before": ours_s / before_s}
        row: dict[str, str | float | bool] = {"workload": self.work.name}
        row |= {k: round(v, 3) for k, v in ratios.items()}
        row |= {"same_work": self.is_same_work} if self.trl else {}
        return row | {"revisions": len(self.revisions), "took_turns": self.took_turns}

    @property
    def _sides(self) -> dict[str, Sequence[Row]]:
        sides = {"ours": self.ours} | ({"ours before": self.before} if self.before else {})
        sides |= {_side(n): rows for n, rows in sorted(self.trl.items())}
        return sides | {"bound": self.bounds}

    def table(self) -> str:
        """Spans of all sides, ratios beside what is expected, and what is allowed of a miss."""
        lines = [f"{self.work.name}: medians of {len(self.ours)} pair(s), seconds per step"]
        lines += [
            f"  {name:16} {_median(rows):7.2f}   {spans(rows)}"
            for name, rows in self._sides.items()
        ]
        return "\n".join([*lines, *self._other_revisions(), *self._ratios(), *self._same_work()])

    def agreements(self, num_threads: int) -> list[Agreement]:
        """Rewards and lengths, step by step, and what was learnt, of TRL with so many threads."""
        theirs = self.trl[num_threads]
        found = []
        for name, of in MEASURES.items():
            our_values = [of(step) for row in self.ours for step in row.steps]
            their_values = [of(step) for row in theirs for step in row.steps]
            apart, error = difference(our_values, their_values)
            found.append(
                Agreement(
                    name,
                    statistics.mean(our_values),
                    statistics.mean(their_values),
                    f"apart by {apart:.3f} ± {error:.3f}",
                    abs(apart) <= FAR_OFF * error,
                )
            )
        if self.untrained is not None:
            our_rise, their_rise = self._rise(self.ours), self._rise(theirs)
            least, most = sorted((our_rise, their_rise))
            found.append(
                Agreement(
                    "learnt",
                    our_rise,
                    their_rise,
                    f"nats per held-out token, {LEARNT:.0%} of the other's are asked for",
                    0 < most * LEARNT <= least,
                )
            )
        return found

    def _of_bounds(self, seconds: Callable[[Step], float | None]) -> float | None:
        """The median; None: older rows have none."""
        found = [[seconds(step) for step in row.steps] for row in self.bounds]
        told = [[s for s in steps if s is not None] for steps in found]
        return statistics.median(map(statistics.median, told)) if all(told) else None

    def _rise(self, rows: Sequence[Row]) -> float:
        assert self.untrained is not None
        return statistics.median(_heldout(row) for row in rows) - self.untrained

    def _other_revisions(self) -> list[str]:
        said = []
        if len(self.revisions) > 1:
            said.append(f"  the rows are of several revisions: {', '.join(self.revisions)}")
        for name, rows in self._sides.items():
            pairs = zip(self.ours, rows, strict=True)
            apart = {(own.key.revision, row.key.revision) for own, row in pairs}
            if others := sorted(pair for pair in apart if pair[0] != pair[1]):
                listed = ", ".join(f"{theirs} with ours of {own}" for own, theirs in others)
                said.append(
                    f"  {name}: rows of {listed}: they did not take turns, and the machine may "
                    "have been another's"
                )
        return said

    def _ratios(self) -> list[str]:
        row = self.row()
        ratios = {
            name: (float(row[name]), wanted)
            for name, wanted in vars(self.work.expected).items()
            if name in row
        }
        lines = [
            f"  {name.replace('_', ' '):16} {reached:7.2f}   expected {wanted}"
            for name, (reached, wanted) in ratios.items()
        ]
        lines += [
            f"  missed: {name.replace('_', ' ')}: wanted {wanted}, reached {reached:.2f}, "
            f"{self._allowed(name, wanted)}"
            for name, (reached, wanted) in ratios.items()
            if reached < wanted
        ]
        if float(row["efficiency"]) > 1:
            lines.append(
                "  ours is faster than with a core for each phase: it trains on both while the "
                "server rests"
            )
        if not self.is_bound_kept:
            lines.append(
                "  ours is faster than the bound of two shared cores, which was measured while the "
                "machine was busier: measure again"
            )
        if not self.is_arrival_kept:
            lines.append(
                "  ours is faster than the estimate for groups as they arrive: with an order of "
                "requests that it does not try, or measured while the machine was less busy"
            )
        return lines

    def _allowed(self, name: str, wanted: float) -> str:
        """What bounds and estimate allow of a ratio that was not reached."""
        row = self.row()
        sides = {"one_machine": "trl_s", "separate_devices": "trl_one_thread_s"}
        slower = float(row[sides.get(name, "bound_s")])
        most = {key: slower / float(row[key]) for key in ALLOWING if key in row}
        listed = ", ".join(f"{most[key]:.2f} {ALLOWING[key]}" for key in most)
        return f"allowed {listed}: {_verdict({k: m < wanted for k, m in most.items()})}"

    def _same_work(self) -> list[str]:
        return [
            f"  {each.measure:16} {_side(n)}: {each}"
            for n in sorted(self.trl)
            for each in self.agreements(n)
        ]


def _verdict(forbids: Mapping[str, bool]) -> str:
    """Of what a ratio is allowed by; the strongest reason of those that forbid it."""
    if forbids["bound_shared_s"]:
        return "the bound forbids it"
    if forbids.get("bound_beside_s"):
        return "the bound forbids it, by what phases of this machine take beside each other"
    if forbids.get("arrival_estimate_s"):
        return "no bound forbids it, the estimate does"
    if forbids.get("arrival_beside_s"):
        return "no bound forbids it, the estimate does, by what phases take beside each other"
    return "neither forbids it"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean difference of the same steps, and its standard error; infinite for a single step."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(apart) < 2:
        return apart[0], float("inf")
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5


def spans(rows: Sequence[Row]) -> str:
    """Medians over the runs of each run's medians over steps; of spans that all runs have.

    A phase that is part of another span and takes less than 5 ms is left out.
    """
    names = [name for name in rows[0].spans if all(name in row.spans for row in rows)]
    seconds = {name: statistics.median(row.spans[name] for row in rows) for name in names}
    return "  ".join(
        f"{name} {value:.2f}"
        for name, value in seconds.items()
        if not name.startswith(PHASE) or value >= 0.005
    )


def _side(num_threads: int) -> str:
    return f"TRL, {num_threads} thread(s)"


def _heldout(row: Row) -> float:
    assert row.measured.heldout is not None
    return row.measured.heldout


def _median(
    rows: Sequence[Row], seconds: Callable[[Step], float] = lambda step: step.seconds
) -> float:
    return statistics.median(row.step_median(seconds) for row in rows)
