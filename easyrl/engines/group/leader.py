"""The engine of the head of a model-parallel group: each call is made by the whole group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from easyrl.engines.base import (
    MetricSums,
    NonFiniteLossError,
    SavedState,
    Snapshot,
    StateFile,
    StepResult,
    TrainEngine,
    WeightKind,
)
from easyrl.engines.group.calls import perform
from easyrl.engines.group.channel import GroupChannel
from easyrl.schema import FrozenLogprobs, MicroBatch

Backward = tuple[list[MetricSums], str | None]  # of a call's rows, and what was not finite


class SplitEngine(TrainEngine, Protocol):
    """A part of a model that is split."""

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of this pipeline stage, on the process that writes them. Collective
        over the stage."""


class GroupLeader:
    """A ``TrainEngine`` whose calls the followers repeat, each on its part of the model.

    Args:
        engine: the head's own part.
        files: for snapshots, which are written beside the calls.
        teller: rank of the process that has what the model says.
        writers: ranks of the group that write weights, each its stage's; empty in all groups but
            the first.
        calls_under_way: of ``forward_backward``, that the teller may still be at work on when this
            process goes on.
    """

    def __init__(
        self,
        engine: SplitEngine,
        calls: GroupChannel,
        files: GroupChannel,
        teller: int,
        writers: Sequence[int] = (),
        calls_under_way: int = 0,
    ) -> None:
        self._engine = engine
        self._calls, self._files = calls, files
        self._teller, self._writers = teller, writers
        self._most_under_way = calls_under_way
        self._under_way: deque[Backward] = deque()  # what this process had to say of each
        self._told: list[Backward] = []  # what the teller has said, and nobody has asked for yet
        self._num_snapshots = 0
        self.ranks = engine.ranks
        self.device = engine.device
        self.lockstep = engine.lockstep
        self.can_look_ahead = engine.can_look_ahead
        self.spans = engine.spans

    @property
    def has_frozen_models(self) -> bool:
        return self._engine.has_frozen_models

    def set_controls(self, controls: Mapping[str, float]) -> None:
        self._all("set_controls", dict(controls))

    def begin_batch(self) -> None:
        self._all("begin_batch")

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return self._engine.prepare(micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> list[MetricSums]:
        self._under_way.append(self._all("forward_backward", list(micro_batches)))
        return self._backwards(self._most_under_way)

    def finish_backwards(self) -> list[MetricSums]:
        self._all("finish_backwards")
        return self._backwards(0)

    def optimizer_step(self, denominator: float, value_denominator: float = 0.0) -> StepResult:
        result: StepResult = self._all("optimizer_step", denominator, value_denominator)
        return result

    def discard_gradients(self) -> None:
        self._all("discard_gradients")

    def frozen_logprobs(self, micro_batch: MicroBatch) -> FrozenLogprobs:
        said: FrozenLogprobs = self._ask("frozen_logprobs", micro_batch)
        return said

    def evaluate(self, micro_batch: MicroBatch) -> MetricSums:
        metrics: MetricSums = self._ask("evaluate", micro_batch)
        return metrics

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        said: Tensor = self._ask("logprobs", micro_batch)
        return said

    def named_weights(self, kind: WeightKind = "full") -> Iterator[tuple[str, Tensor]]:
        self._calls.tell(("named_weights", (kind,)))
        return self._engine.named_weights(kind)

    @contextmanager
    def perturbed_weights(self, kind: Literal["full", "adapter"] = "full") -> Iterator[None]:
        self._calls.tell(("perturb", (kind,)))
        with self._engine.perturbed_weights(kind):
            try:
                yield
            finally:
                self._calls.tell(("unperturb", ()))

    def group_sees(self, file: Path) -> bool:
        """Whether all processes see ``file``, which this one has made."""
        self._calls.tell(("sees", (str(file),)))
        return all(self._calls.fetch_all())

    def begin_shares(self, request: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Has every writer write its pipeline stage as ``request`` says; this process's stage."""
        self._calls.tell(("write_share", (request,)))
        return self._engine.stage_weights()

    def share_messages(self) -> Iterator[dict[str, Any]]:
        """What the other writers say of theirs, one writer behind the other, to the last."""
        for writer in self._writers[1:]:
            while (message := self._calls.fetch(writer)) is not None:
                yield message

    def snapshot(self) -> Snapshot:
        self._num_snapshots += 1
        self._calls.tell(("snapshot", (self._num_snapshots,)))
        return GroupSnapshot(self._engine.snapshot(), self._num_snapshots, self._files)

    def restore(self, saved: SavedState) -> None:
        files = tuple(str(file) for file in saved.files)
        self._calls.tell(("restore", (files, dict(saved.description))))
        problem = None
        try:
            self._engine.restore(saved)
        except ValueError as error:
            problem = str(error)
        problems = [each for each in (problem, *self._calls.fetch_all()) if each is not None]
        if problems:
            raise ValueError(problems[0])

    def _all(self, call: str, *arguments: Any) -> Any:
        """Made by all; what comes of it here."""
        self._calls.tell((call, arguments))
        return perform(self._engine, call, arguments)

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Made by all; what the teller has."""
        own = self._all(call, *arguments)
        self._hear_backwards(0)  # it answers in the order of the calls
        return self._of_teller(own)

    def _backwards(self, still_under_way: int) -> list[MetricSums]:
        """What the teller has said of calls, all but so many of the last."""
        self._hear_backwards(still_under_way)
        told, self._told = self._told, []
        problems = [problem for _, problem in told if problem is not None]
        if problems:
            raise NonFiniteLossError(problems[-1])
        return [metrics for rows, _ in told for metrics in rows]

    def _hear_backwards(self, still_under_way: int) -> None:
        while len(self._under_way) > still_under_way:
            self._told.append(self._of_teller(self._under_way.popleft()))

    def _of_teller(self, own: Any) -> Any:
        """Of the oldest call that it has not been asked for; ``own`` where that is this process."""
        return own if self._teller == self._calls.head else self._calls.fetch(self._teller)


@dataclass(frozen=True)
class GroupSnapshot:
    """The shares of all processes of a group (``Snapshot``)."""

    own: Snapshot
    number: int
    channel: GroupChannel  # its followers write when they are told

    @property
    def description(self) -> Mapping[str, Any]:
        return self.own.description

    def write(self, folder: Path, stem: str) -> list[StateFile]:
        """A file of each process. Raises ``OSError`` with what the first of them met."""
        self.channel.tell((self.number, str(folder), stem))
        files, problem = [], None
        try:
            files += self.own.write(folder, stem)
        except OSError as error:
            problem = error
        for said, theirs in self.channel.fetch_all():
            files += theirs
            problem = problem or (said and OSError(said))
        if problem:
            raise problem
        return files
