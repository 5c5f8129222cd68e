"""Which part of the model a process has: tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.engines.megatron.weights.pieces import TensorRank
from easyrl.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a run share a model. Tensor-parallel ranks are neighbours, then
    data-parallel ones; pipeline stages are farthest apart (megatron-core's order
    ``tp-cp-ep-dp-pp``).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1  # of layers, in each pipeline stage (interleaved 1F1B)
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def place(self, rank: int) -> Place:
        """Of the process with this number."""
        return Place(
            tensor=rank % self.tensor,
            data=rank // self.tensor % self.data,
            stage=rank // (self.tensor * self.data),
            layout=self,
        )

    def rank(self, tensor: int, data: int, stage: int) -> int:
        """Inverse of ``place``."""
        return (stage * self.data + data) * self.tensor + tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A process's coordinates in a layout."""

    tensor: int
    data: int
    stage: int
    layout: Layout

    @property
    def tensor_rank(self) -> TensorRank:
        return TensorRank(self.tensor, self.layout.tensor)

    @property
    def is_head(self) -> bool:
        """Whether it runs the producer of its model-parallel group."""
        return self.tensor == 0 and self.stage == 0

    @property
    def ranks(self) -> Ranks:
        """What the trainer knows of it."""
        layout = self.layout
        rank = layout.rank(self.tensor, self.data, self.stage)
        return Ranks(rank, layout.world_size, self.data, layout.data, self.is_head)
