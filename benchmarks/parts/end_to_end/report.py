"""A workload's comparison: medians over pairs, ratios, the bound, and whether both did the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.parts.end_to_end.bound import AS_THEY_ARRIVE
from benchmarks.parts.end_to_end.rows import Row, Step
from benchmarks.parts.end_to_end.workloads import Workload

FAR_OFF = 4.0  # standard errors: five workloads make some thirty comparisons
LEARNT = 0.5  # of what the other side has learnt, at least

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
        """Whether ours is no faster than what nothing can beat."""
        return _median(self.bounds) <= _median(self.ours)

    def row(self) -> dict[str, str | float | bool]:
        """Of the last line: seconds per step, and ratios."""
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
        if (arrival_s := self._arrival_bound_s()) is not None:
            ratios["arrival_bound_s"] = arrival_s
        if self.before:
            before_s = _median(self.before)
            ratios |= {"before_s": before_s, "of_before": ours_s / before_s}
        row: dict[str, str | float | bool] = {"workload": self.work.name}
        row |= {k: round(v, 3) for k, v in ratios.items()}
        return row | ({"same_work": self.is_same_work} if self.trl else {})

    def table(self) -> str:
        """Spans of all sides, ratios beside what is expected, and what forbids it."""
        sides = {"ours": self.ours} | ({"ours before": self.before} if self.before else {})
        sides |= {_side(n): rows for n, rows in sorted(self.trl.items())}
        sides["bound"] = self.bounds
        lines = [f"{self.work.name}: medians of {len(self.ours)} pair(s), seconds per step"]
        lines += [
            f"  {name:16} {_median(rows):7.2f}   {spans(rows)}" for name, rows in sides.items()
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

    def _arrival_bound_s(self) -> float | None:
        """The bound if no group is trained before it is complete; None for rows without it."""
        names = (AS_THEY_ARRIVE, "optimizer", "sync")
        if any(AS_THEY_ARRIVE not in row.spans for row in self.bounds):
            return None
        return statistics.median(
            statistics.median(sum(step.spans[name] for name in names) for step in row.steps)
            for row in self.bounds
        )

    def _rise(self, rows: Sequence[Row]) -> float:
        assert self.untrained is not None
        return statistics.median(_heldout(row) for row in rows) - self.untrained

    def _other_revisions(self) -> list[str]:
        said = []
        all_ours = sorted({row.key.revision for row in self.ours})
        if len(all_ours) > 1:
            said.append(f"  the pairs are of several revisions: {', '.join(all_ours)}")
        pairs = [
            (own.key.revision, row.key.revision)
            for rows in self.trl.values()
            for own, row in zip(self.ours, rows, strict=True)
        ]
        if apart := sorted({pair for pair in pairs if pair[0] != pair[1]}):
            listed = ", ".join(f"{theirs} with ours of {ours}" for ours, theirs in apart)
            said.append(
                f"  TRL's rows are of {listed}: they did not take turns, and the machine may have "
                "been another's"
            )
        return said

    def _ratios(self) -> list[str]:
        row = self.row()
        lines = []
        for name, wanted in vars(self.work.expected).items():
            if name not in row:
                continue
            reached = float(row[name])
            line = f"  {name.replace('_', ' '):16} {reached:7.2f}   expected {wanted}"
            if reached < wanted:
                line += self._most(name, wanted)
            lines.append(line)
        if not self.is_bound_kept:
            lines.append("  the bound was measured while the machine was busier: measure again")
        return lines

    def _most(self, name: str, wanted: float) -> str:
        """What the bound allows of a ratio that was not reached."""
        row = self.row()
        side = {"one_machine": "trl_s", "separate_devices": "trl_one_thread_s"}.get(name)
        if side is None:
            if "arrival_bound_s" not in row:
                return ""
            most = float(row["bound_s"]) / float(row["arrival_bound_s"])
            return f", at most {most:.2f} if no group is trained before it is complete"
        most = float(row[side]) / float(row["bound_s"])
        forbids = ", which forbids it" if most < wanted else ""
        return f", at most {most:.2f} by the bound{forbids}"

    def _same_work(self) -> list[str]:
        return [
            f"  {each.measure:16} {_side(n)}: {each}"
            for n in sorted(self.trl)
            for each in self.agreements(n)
        ]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean difference of the same steps, and its standard error; infinite for a single step."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(apart) < 2:
        return apart[0], float("inf")
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5


def spans(rows: Sequence[Row]) -> str:
    """Medians over the runs of each run's medians over steps."""
    names = rows[0].spans
    return "  ".join(
        f"{name} {statistics.median(row.spans[name] for row in rows):.2f}" for name in names
    )


def _side(num_threads: int) -> str:
    return f"TRL, {num_threads} thread(s)"


def _heldout(row: Row) -> float:
    assert row.measured.heldout is not None
    return row.measured.heldout


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row.step_s for row in rows)
