"""Who a process is among all that train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in the run (docs/architecture.md).

    Every rank computes. The *head* of each model-parallel group runs the trainer and a producer for
    the group's share of the prompts, and hands micro-batches to its peers; with data parallelism
    alone every rank is one. What heads tell each other is by ``dp_rank``.
    """

    rank: int  # among all processes
    world_size: int
    dp_rank: int  # of the model-parallel group, among all of them
    dp_size: int
    is_head: bool = True
    heads: tuple[int, ...] | None = None  # ranks of the heads by ``dp_rank``; None: all are

    @classmethod
    def data_parallel(cls, rank: int = 0, world_size: int = 1) -> Ranks:
        """Each process holds the whole model, or a ZeRO shard of it."""
        return cls(rank, world_size, rank, world_size)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once for the whole run."""
        return self.rank == 0
