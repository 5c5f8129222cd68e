"""How far an open batch is, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from easyrl.dataloaders.producer.membership import BatchMembership


class Stream(Protocol):
    """Of one optimizer step's groups (``GroupStream``)."""

    @property
    def num_trained(self) -> int: ...


class BatchProgress(NamedTuple):
    """Groups of an open batch, or records where these are trained."""

    size: int  # that it will have, of all ranks, if no further one is refused or excluded
    arrived: int  # finished and accepted, of all ranks
    trained: int  # of this rank

    @classmethod
    def of(cls, membership: BatchMembership, streams: Sequence[Stream]) -> BatchProgress:
        """From any thread: numbers of about the same moment."""
        arrived = membership.num_accepted
        return cls(
            size=min(membership.batch_size, arrived + membership.num_undecided),
            arrived=arrived,
            trained=sum(stream.num_trained for stream in streams),
        )
