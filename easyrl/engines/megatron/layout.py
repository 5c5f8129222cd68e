"""Which part of the model a process has: tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl.config import ConfigError
from easyrl.config.parallel import ParallelConfig, Schedule
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
    layers_per_stage: tuple[int, ...] | None = None  # None: as many in each
    schedule: Schedule = "auto"  # of rows in a pipeline

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> Layout:
        """Raises ``ConfigError`` if so many processes have not whole copies of the model."""
        if world_size % parallel.ranks_per_model:
            raise ConfigError(
                f"{parallel.split_key}: {parallel.ranks_per_model} processes share one copy of the "
                f"model, but the launcher has started {world_size}; start a multiple of "
                f"{parallel.ranks_per_model}"
            )
        stages = parallel.layers_per_stage
        return cls(
            parallel.tensor,
            parallel.pipeline,
            world_size // parallel.ranks_per_model,
            parallel.chunks_per_stage,
            parallel.sequence,
            None if stages is None else tuple(stages),
            parallel.schedule,
        )

    def layers_of(self, stage: int, chunk: int, num_layers: int) -> range:
        """Of all ``num_layers``, those of a chunk of a pipeline stage."""
        if self.layers_per_stage is not None:
            start = sum(self.layers_per_stage[:stage])
            return range(start, start + self.layers_per_stage[stage])
        size = num_layers // (self.pipeline * self.chunks)
        start = (chunk * self.pipeline + stage) * size
        return range(start, start + size)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """The pipeline stage that has a layer."""
        return next(
            stage
            for stage in range(self.pipeline)
            for chunk in range(self.chunks)
            if layer in self.layers_of(stage, chunk, num_layers)
        )

    @property
    def is_open_schedule(self) -> bool:
        """Whether rows enter a pipeline one by one, in one schedule for all of an update."""
        return self.pipeline > 1 and self.chunks == 1 and self.schedule != "flush"

    @property
    def row_multiple(self) -> int:
        """Of which a row's number of tokens has to be one."""
        return self.tensor if self.sequence_parallel else 1

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

    def head(self, data: int) -> int:
        """Rank of the process that runs the trainer of a model-parallel group."""
        return self.rank(0, data, 0)

    def teller(self, data: int) -> int:
        """Rank of the process of a group that has what the model says."""
        return self.rank(0, data, self.pipeline - 1)

    def writer(self, stage: int) -> int:
        """Rank of the process that writes a pipeline stage's weights for the endpoints."""
        return self.rank(0, 0, stage)

    def group(self, data: int) -> list[int]:
        """Ranks of a model-parallel group, the head first."""
        return [
            self.rank(tensor, data, stage)
            for stage in range(self.pipeline)
            for tensor in range(self.tensor)
        ]


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
    def tells(self) -> bool:
        """Whether it is the one of its group that has what the model says."""
        return self.tensor == 0 and self.stage == self.layout.pipeline - 1

    @property
    def ranks(self) -> Ranks:
        """What the trainer knows of it."""
        layout = self.layout
        rank = layout.rank(self.tensor, self.data, self.stage)
        heads = tuple(map(layout.head, range(layout.data)))
        return Ranks(rank, layout.world_size, self.data, layout.data, self.is_head, heads)
