"""A workload's comparison: medians over pairs, ratios, the bound, and whether both did the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.parts.end_to_end.rows import Row, Step
from benchmarks.parts.end_to_end.workloads import Workload

FAR_OFF = 3.0  # standard errors


@dataclass(frozen=True)
class Comparison:
    """All runs of one workload.

    Attributes:
        ours: a run for each pair.
        trl: by threads, a run for each pair; without any where only ours was measured.
        bounds: of each of our runs.
    """

    work: Workload
    ours: Sequence[Row]
    trl: Mapping[int, Sequence[Row]]
    bounds: Sequence[Row]

    @property
    def fastest_trl(self) -> int:
        """Threads on one machine."""
        return min(self.trl, key=lambda num_threads: _median(self.trl[num_threads]))

    def row(self) -> dict[str, str | float]:
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
        return {"workload": self.work.name} | {k: round(v, 3) for k, v in ratios.items()}

    def table(self) -> str:
        """Spans of all sides, ratios beside what is expected, and what forbids it."""
        sides = {"ours": self.ours}
        sides |= {f"TRL, {n} thread(s)": rows for n, rows in sorted(self.trl.items())}
        sides["bound"] = self.bounds
        lines = [f"{self.work.name}: medians of {len(self.ours)} pair(s), seconds per step"]
        lines += [
            f"  {name:16} {_median(rows):7.2f}   {spans(rows)}" for name, rows in sides.items()
        ]
        return "\n".join([*lines, *self._ratios(), *self._same_work()])

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
        if float(row["efficiency"]) > 1:
            lines.append("  the bound was measured while the machine was busier: measure again")
        return lines

    def _most(self, name: str, wanted: float) -> str:
        """What the bound allows of a ratio that was not reached."""
        side = {"one_machine": "trl_s", "separate_devices": "trl_one_thread_s"}.get(name)
        if side is None:
            return ""
        row = self.row()
        most = float(row[side]) / float(row["bound_s"])
        forbids = ", which forbids it" if most < wanted else ""
        return f", at most {most:.2f} by the bound{forbids}"

    def _same_work(self) -> list[str]:
        """Rewards and lengths of both sides, step by step, of the same prompts."""
        lines: list[str] = []
        if not self.trl:
            return lines
        measures: dict[str, Callable[[Step], float]] = {
            "reward": lambda step: step.reward,
            "response tokens": lambda step: step.response_tokens,
        }
        for name, of in measures.items():
            ours = [of(step) for row in self.ours for step in row.steps]
            trl = [of(step) for row in self.trl[self.fastest_trl] for step in row.steps]
            apart, error = difference(ours, trl)
            verdict = "the same work" if abs(apart) <= FAR_OFF * error else "NOT THE SAME WORK"
            lines.append(
                f"  {name:16} ours {statistics.mean(ours):.3f}, TRL {statistics.mean(trl):.3f}: "
                f"apart by {apart:.3f} ± {error:.3f}: {verdict}"
            )
        return lines


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


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row.step_s for row in rows)
