"""A split model's masters and moments in a checkpoint, told by Hugging Face's tensors.

So any layout finds what another has written, and DeepSpeed's engine too. Each rank saves its
data-parallel partition of its own rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
from torch import nn

from easyrl.config import Config
from easyrl.engines.base import SavedState
from easyrl.engines.deepspeed.shards import Fragment, Shard, shards_of
from easyrl.engines.deepspeed.state import optimizer_pieces, restore_optimizer, restore_schedule
from easyrl.engines.deepspeed.state_fit import SCHEDULE, require_fit, state_description
from easyrl.engines.megatron.layout import Place
from easyrl.engines.megatron.weights.fragments import tensor_fragments, told_by
from easyrl.engines.megatron.weights.gathering import WholeModel
from easyrl.engines.state_file import EngineState


@dataclass(frozen=True)
class SplitState:
    """What a rank saves and restores.

    Attributes:
        engine: with the optimizer and the schedule.
        parameters: this rank's, named as the whole model's.
    """

    config: Config
    engine: deepspeed.DeepSpeedEngine
    parameters: Mapping[str, nn.Parameter]
    model: WholeModel
    place: Place

    def snapshot(self) -> EngineState:
        """Masters, moments, step counts: host memory, 12 bytes per parameter of this rank's
        partition.
        """
        pieces = list(optimizer_pieces(self.engine.optimizer, self._shards()))
        position = {SCHEDULE: self.engine.lr_scheduler.last_epoch}
        return EngineState(pieces, self._description() | position)

    def restore(self, saved: SavedState) -> None:
        """What pads a vocabulary becomes 0. Collective over the data-parallel group.

        Raises ``ValueError`` if the checkpoint does not fit.
        """
        require_fit(self._description(), self._sizes(), saved)
        restore_optimizer(self.engine.optimizer, self._shards(), saved)
        restore_schedule(self.engine.lr_scheduler, saved.description[SCHEDULE])

    def _shards(self) -> list[Shard]:
        """The optimizer's, told by Hugging Face's tensors."""
        rules, tensor_rank = self.model.rules, self.place.tensor
        own = told_by(rules, tensor_rank)

        def told(fragments: list[Fragment]) -> list[Fragment]:
            return [
                of_tensor
                for each in fragments
                for of_tensor in tensor_fragments(
                    each, self.model.pieces(rules[each.name], tensor_rank), self.model.shapes
                )
            ]

        return [
            Shard(
                shard.name,
                shard.tensor,
                told(shard.fragments),
                told([each for each in shard.saved if each.name in own]),
                shard.ranks,
            )
            for shard in shards_of(self.engine.optimizer, self.parameters, self.place.ranks)
        ]

    def _description(self) -> dict[str, Any]:
        return state_description(
            self.config, engine="megatron", num_parameters=sum(self._sizes().values())
        )

    def _sizes(self) -> dict[str, int]:
        """Elements of the whole model's tensors."""
        names = {tensor for rule in self.model.rules.values() for tensor in rule.tensors}
        return {name: math.prod(self.model.shapes[name]) for name in names}
