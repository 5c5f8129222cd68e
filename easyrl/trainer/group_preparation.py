"""What is made of a group as it arrives, while the trainer waits for those it is packed with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from easyrl.metrics.group_counts import GroupCounts
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.schema import Key, RolloutGroup, TrainedGroup


class PreparedGroup(NamedTuple):
    """A function of the group alone.

    Attributes:
        arrived: the group as it was handed over.
        group: with the scores to train with.
        trained: None where its advantages need more than the group.
    """

    arrived: RolloutGroup
    counts: GroupCounts
    group: RolloutGroup
    trained: TrainedGroup | None


class OfOneGroup(Protocol):
    """The recipe's functions of a group (``accumulation.GroupFunctions``)."""

    def scored(self, group: RolloutGroup, /) -> RolloutGroup: ...
    def trained_alone(self, group: RolloutGroup, /) -> TrainedGroup | None: ...


@dataclass(frozen=True)
class GroupPreparation:
    """Of one update's groups. Raises what the recipe raises."""

    functions: OfOneGroup
    recovered: Collection[Key]  # finished in an earlier attempt of the run
    clock: PhaseClock
    _prepared: dict[Key, PreparedGroup] = field(default_factory=dict)

    def prepare(self, group: RolloutGroup) -> None:
        """As it arrives; it is not counted before it is handed out, which it may never be."""
        with self.clock.phase("pack"):
            self._prepared[group.prompt.key] = self._made_of(group)

    def take(self, group: RolloutGroup) -> PreparedGroup:
        """As it is handed out."""
        prepared = self._prepared.pop(group.prompt.key, None)
        if prepared is None or prepared.arrived is not group:  # it was somewhere else than here
            prepared = self._made_of(group)
        return prepared

    def _made_of(self, group: RolloutGroup) -> PreparedGroup:
        counts = GroupCounts.of(group, recovered=group.prompt.key in self.recovered)
        scored = self.functions.scored(group)
        return PreparedGroup(group, counts, scored, self.functions.trained_alone(scored))
