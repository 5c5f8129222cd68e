"""What the recipes have learnt: table, figure, and whether it is what was expected."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parts.recipes.ready_files import CLIPPING_UPDATES
from benchmarks.parts.recipes.rows import Row

LEAST_LEARNT, MOST_BY_CHANCE = 0.3, 0.15  # above the start
MOST_BELOW_TEACHER = 0.05
LEAST_EXPLAINED = 0.3  # of a critic's returns, their variance
LONGEST_S = 60.0  # of a run
NONE = "-"  # in the table
HEADER = [
    *("recipe", "start", "sync", "async", "shuffled", "streams"),
    *("clipped", "explained variance", "s a run"),
]


@dataclass(frozen=True)
class Learnt:
    """A recipe's runs; accuracies on held-out problems.

    Attributes:
        clips: whether a bound of the ratio has updates enough to act in.
        asynchronous: one for each seed.
        shuffled: None where no reward acts.
        teacher: of a distillation.
    """

    recipe: str
    streams: bool
    has_critic: bool
    clips: bool
    start: Row
    sync: Row
    asynchronous: Sequence[Row]
    shuffled: Row | None
    teacher: Row | None = None

    @property
    def runs(self) -> list[Row]:
        return [*self.asynchronous, self.sync, *([self.shuffled] if self.shuffled else [])]

    @property
    def accuracies(self) -> list[float]:
        """Of the asynchronous runs."""
        return [row.measured.accuracy for row in self.asynchronous]

    @property
    def clip_fraction(self) -> float | None:
        """The mean over the asynchronous runs; None: the loss has no clip."""
        return _mean([row.measured.clip_fraction for row in self.asynchronous])

    @property
    def explained_variance(self) -> float | None:
        """The mean over the asynchronous runs; None: there is no critic."""
        return _mean([row.measured.explained_variance for row in self.asynchronous])

    def row(self) -> dict[str, Any]:
        """For the last line; ``async`` is the mean over seeds."""
        return {
            "recipe": self.recipe,
            "start": self.start.measured.accuracy,
            "sync": self.sync.measured.accuracy,
            "async": round(statistics.mean(self.accuracies), 4),
            "shuffled": self.shuffled.measured.accuracy if self.shuffled else None,
            "streams": self.streams,
            "async_seeds": self.accuracies,
            "teacher": self.teacher.measured.accuracy if self.teacher else None,
            "clip_fraction": self.clip_fraction,
            "explained_variance": self.explained_variance,
            "seconds": max(row.measured.seconds for row in self.runs),
        }

    def cells(self) -> list[str]:
        """Of the table."""
        of_seeds = ", ".join(f"{accuracy:.3f}" for accuracy in self.accuracies)
        seconds = sorted(row.measured.seconds for row in self.runs)
        return [
            f"`{self.recipe}`",
            f"{self.start.measured.accuracy:.3f}",
            f"{self.sync.measured.accuracy:.3f}",
            f"{statistics.mean(self.accuracies):.3f} ({of_seeds})",
            f"{self.shuffled.measured.accuracy:.3f}" if self.shuffled else NONE,
            "yes" if self.streams else "no, whole batch",
            NONE if self.clip_fraction is None else f"{100 * self.clip_fraction:.2g} %",
            NONE if self.explained_variance is None else f"{self.explained_variance:.2f}",
            f"{seconds[0]:.0f}–{seconds[-1]:.0f}",
        ]

    def problems(self) -> list[str]:
        """What is not as expected."""
        start = self.start.measured.accuracy
        named = [(f"async, seed {row.key.seed}", row) for row in self.asynchronous]
        said = [
            f"{self.recipe}: {name}: {row.measured.accuracy:.3f} is not {LEAST_LEARNT} above the "
            f"start, {start:.3f}"
            for name, row in [*named, ("sync", self.sync)]
            if row.measured.accuracy < start + LEAST_LEARNT
        ]
        if self.shuffled and self.shuffled.measured.accuracy > start + MOST_BY_CHANCE:
            said.append(
                f"{self.recipe}: shuffled rewards: {self.shuffled.measured.accuracy:.3f} is more "
                f"than {MOST_BY_CHANCE} above the start, {start:.3f}"
            )
        if self.teacher is not None:
            least = self.teacher.measured.accuracy - MOST_BELOW_TEACHER
            said += [
                f"{self.recipe}: {name}: {row.measured.accuracy:.3f} is more than "
                f"{MOST_BELOW_TEACHER} below the teacher, {self.teacher.measured.accuracy:.3f}"
                for name, row in [*named, ("sync", self.sync)]
                if row.measured.accuracy < least
            ]
        if self.has_critic and (self.explained_variance or 0.0) <= LEAST_EXPLAINED:
            said.append(
                f"{self.recipe}: explained variance {self.explained_variance} is not above "
                f"{LEAST_EXPLAINED}"
            )
        if self.clips and not self.clip_fraction:
            said.append(f"{self.recipe}: no bound of the ratio acted")
        longest = max(row.measured.seconds for row in self.runs)
        if longest > LONGEST_S:
            said.append(f"{self.recipe}: a run took {longest:.0f} s, more than {LONGEST_S:.0f}")
        return said


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one is missing."""
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 5) if known and len(known) == len(values) else None


def markdown(learnt: Sequence[Learnt]) -> str:
    """The table."""
    lines = [HEADER, ["---"] * len(HEADER), *(each.cells() for each in learnt)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(learnt: Sequence[Learnt], figure: str, num_batches: int | None) -> str:
    """What ``docs/recipes-results.md`` has; ``figure``: the image's name beside it."""
    revisions = sorted({row.key.revision for each in learnt for row in each.runs})
    length = "as long as the file says" if num_batches is None else f"at most {num_batches} batches"
    problems = [f"- {said}" for each in learnt for said in each.problems()]
    verdict = "As expected, all of them." if not problems else "Not as expected:"
    return "\n".join(
        [
            "# What each recipe learns on the demo's task",
            "",
            "Written by `python -m benchmarks.recipes` from the ready files in `configs/recipes/`: "
            f"three-digit addition, {length}, two CPU",
            "cores. Accuracy is of 1,000 held-out problems, one answer each sampled at temperature "
            "1 with plain `transformers`. *async* is the mean",
            "of its seeds; in *shuffled* the rewards of each group are permuted (where no group's "
            "mean is a baseline: those of another",
            "prompt), which must teach nothing. *clipped* is the largest share",
            "of a batch's tokens at which a bound of the ratio acts, *explained variance* the "
            "critic's, the best mean over five batches;",
            "both are of the asynchronous runs.",
            "",
            markdown(learnt),
            *(
                f"The teacher of `{each.recipe}`: {each.teacher.measured.accuracy:.3f}.\n"
                for each in learnt
                if each.teacher is not None
            ),
            f"Expected: at least {LEAST_LEARNT} above the start, shuffled at most "
            f"{MOST_BY_CHANCE}, with a teacher at most",
            f"{MOST_BELOW_TEACHER} below it; an explained variance above {LEAST_EXPLAINED}; with "
            f"{CLIPPING_UPDATES} updates per batch, ratios that are clipped; a run at most "
            f"{LONGEST_S:.0f} s. {verdict}",
            *(["", *problems] if problems else []),
            "",
            f"![accuracy of each recipe]({figure})",
            "",
            f"Measured at {', '.join(revisions)}.",
            "",
        ]
    )


def plot(learnt: Sequence[Learnt], path: Path) -> None:
    """A line for each recipe: start, teacher, asynchronous runs, the synchronous and the shuffled
    one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.32 * len(learnt)), layout="constrained")
    places = range(len(learnt))
    named: dict[str, tuple[Sequence[Row | None], dict[str, Any]]] = {
        "before": ([each.start for each in learnt], {"marker": "|", "color": "black", "s": 120}),
        "sync": ([each.sync for each in learnt], {"marker": "x", "color": "tab:orange"}),
        "rewards shuffled": (
            [each.shuffled for each in learnt],
            {"marker": "o", "facecolors": "none", "edgecolors": "tab:red"},
        ),
        "teacher": (
            [each.teacher for each in learnt],
            {"marker": "*", "color": "tab:green"},
        ),
    }
    for number in range(max(len(each.asynchronous) for each in learnt)):
        rows = [each.asynchronous[number] for each in learnt]
        label = {"label": "async, each seed"} if number == 0 else {}
        accuracies = [row.measured.accuracy for row in rows]
        axes.scatter(accuracies, places, color="tab:blue", alpha=0.6, **label)
    for label, (some, style) in named.items():
        points = [(row.measured.accuracy, y) for row, y in zip(some, places, strict=True) if row]
        if points:
            axes.scatter(*zip(*points, strict=True), label=label, zorder=3, **style)
    axes.set_yticks(places)
    axes.set_yticklabels([e.recipe if e.streams else f"{e.recipe} (whole batch)" for e in learnt])
    axes.set_ylim(len(learnt) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy on held-out problems")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
