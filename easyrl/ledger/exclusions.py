"""How many prompts a run may lose because endpoints refuse them (``data.max_excluded``).

Counted over the order of the prompts, of all ranks: those of closed batches are in the progress of
a checkpoint, those of the open batch in the journal, so that a resumed run counts the same.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence

from easyrl.schema import ExcludedPrompt, GroupOutcome

SHORTEST_WINDOW = 100  # positions
NUM_REASONS = 5  # that are shown


def window_size(batch_size: int) -> int:
    """Positions of the order among which exclusions are counted."""
    return max(SHORTEST_WINDOW, batch_size)


def recent_exclusions(
    before: Sequence[ExcludedPrompt],
    groups: Sequence[GroupOutcome],
    position: int,
    batch_size: int,
) -> list[ExcludedPrompt]:
    """Behind a closed batch of ``groups`` that began at ``position``: those that still count."""
    of_batch = [
        ExcludedPrompt(position + group.position, group.epoch, group.index, group.reason or "")
        for group in groups
        if group.outcome == "excluded" and group.exclusion == "refused"
    ]
    end = position + len(groups)
    return [e for e in [*before, *of_batch] if e.position > end - window_size(batch_size)]


class ExclusionLimit:
    """The exclusions that count up to the open batch; whether they are too many.

    That is more than ``share`` of ``window_size`` within so many positions that follow each other,
    whatever the order in which they are told.
    """

    def __init__(
        self,
        share: float,
        batch_size: int,
        earlier: Sequence[ExcludedPrompt] = (),
        *,
        location: Callable[[ExcludedPrompt], str] = lambda e: f"prompt {e.prompt_index}",
    ) -> None:
        self._window = window_size(batch_size)
        self._most = int(share * self._window + 1e-9)
        self._share = share
        self._location = location
        self._excluded = sorted(earlier)

    def add(self, excluded: ExcludedPrompt) -> None:
        """Told again, it counts once."""
        if excluded not in self._excluded:
            insort(self._excluded, excluded)

    def problem(self) -> str | None:
        """Why the run has to stop, and what would help; None: it may go on."""
        for first in range(len(self._excluded) - self._most):
            begin = self._excluded[first].position
            if self._excluded[first + self._most].position - begin < self._window:
                end = begin + self._window
                return self._describe([e for e in self._excluded[first:] if e.position < end])
        return None

    def _describe(self, excluded: Sequence[ExcludedPrompt]) -> str:
        examples: dict[str, ExcludedPrompt] = {}
        for each in excluded:
            examples.setdefault(each.reason, each)
        reasons = Counter(each.reason for each in excluded).most_common()
        lines = [
            f"  {number} times, for instance {self._location(examples[reason])}: {reason}"
            for reason, number in reasons[:NUM_REASONS]
        ]
        if (more := len(reasons) - NUM_REASONS) > 0:
            lines.append(f"  and {more} other reasons")
        return "\n".join(
            [
                f"data.max_excluded: {len(excluded)} prompts among {self._window} of the order "
                f"were refused by the endpoints, {self._share:g} x {self._window} may be:",
                *lines,
                "if the prompts are wrong, start a new run without them; if the endpoints are, "
                "mend what the reasons say. What is journalled stays excluded: to go on without "
                "these prompts, use --resume with a higher data.max_excluded",
            ]
        )
