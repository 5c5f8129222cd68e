"""What a person asks to see of the kept groups: of which steps, and which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from easyrl.samples.folder import SampleFolder
from easyrl.samples.records import SampledGroup


@dataclass(frozen=True)
class Selection:
    """The options of ``easyrl samples``."""

    step: int | None = None
    prompt: int | None = None  # index in the dataset
    worst: bool = False
    best: bool = False
    no_signal: bool = False
    truncated: bool = False

    def of(self, groups: Sequence[SampledGroup]) -> list[SampledGroup]:
        """Those of one step's ``groups``: the worst and the best of what the rest leaves."""
        left = [
            group
            for group in groups
            if (self.prompt is None or group.index == self.prompt)
            and not (self.no_signal and group.has_signal)
            and not (self.truncated and not group.truncated)
        ]
        if not (self.worst or self.best):
            return left
        scored = [(mean, group) for group in left if (mean := group.mean_reward) is not None]
        ends = [pick(scored, key=lambda each: each[0])[1]
                for wanted, pick in ((self.worst, min), (self.best, max))
                if wanted and scored]  # fmt: skip
        return [group for group in left if group in ends]

    def find(self, folder: SampleFolder) -> list[SampledGroup]:
        """Of the step that is asked for; of a prompt, without one, of all steps; else of the newest
        step that has such a group.

        Raises ``ValueError`` saying what there is, where there is none.
        """
        steps = folder.steps()
        if not steps:
            raise ValueError(
                f"{folder.path}: has no samples yet; a run keeps some when its first batch closes, "
                "unless samples.per_step is 0"
            )
        if self.step is not None and self.step not in steps:
            raise ValueError(
                f"--step: of step {self.step} nothing is kept; {folder.path} has {len(steps)} "
                f"steps from {steps[0]} to {steps[-1]} (samples.keep says how many)"
            )
        wanted = steps if self.step is None else [self.step]
        if self.prompt is not None:
            found = [group for step in wanted for group in self.of(folder.read(step))]
        else:
            found = next(
                (some for step in reversed(wanted) if (some := self.of(folder.read(step)))), []
            )
        if not found:
            where = f"step {wanted[0]}" if len(wanted) == 1 else f"steps {steps[0]} to {steps[-1]}"
            raise ValueError(
                f"{folder.path}: of {where} no such group is kept; ask for less, or set "
                "samples.per_step higher in the next attempt"
            )
        return found
