"""Rows through the pipeline stages: megatron-core's schedules, with sums in place of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from easyrl.engines.base import MetricSums
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.padding import padded_row, row_of_nothing
from easyrl.engines.megatron.stage import PolicyStage
from easyrl.engines.megatron.streams import Loss, StreamCommunicator, StreamStage
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.runtime.model_spans import ModelSpans
from easyrl.schema import FrozenLogprobs, MicroBatch

ANY_LENGTH = 1  # variable lengths: the shape of each message goes before it
Rows = Sequence[MicroBatch]  # on the device, the same on all ranks of the group
Row = tuple[MicroBatch, SegmentLayout]
# of a row on the last stage: what its gradient is taken of, and what is told of it
AtEnd = Callable[[StreamStage, MicroBatch, SegmentLayout], tuple[Tensor, Any]]
Step = Callable[[Iterator[Row], StreamStage], tuple[Tensor, Any]]


@dataclass
class Pipeline:
    """This process's stage: one chunk of layers, or several (interleaved).

    A schedule takes all its rows through all stages, forward and backward. All ranks of a group
    call it with the same rows. What it returns is there on the last stage, in the rows' order;
    elsewhere it is empty.
    """

    layout: Layout
    stages: Sequence[PolicyStage]  # of the policy, by chunk
    policy: nn.Module | None  # an engine around its only chunk; None: several, run as they are
    frozen: Mapping[str, Sequence[PolicyStage]]  # by their names in ``FrozenLogprobs``
    device: torch.device
    sent_bytes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    _: KW_ONLY
    # told when each model runs; not the backward of megatron-core's own schedules
    spans: ModelSpans = field(default_factory=ModelSpans)

    def forward_backward(
        self, rows: Rows, loss: Loss, frozen: Collection[str]
    ) -> list[tuple[MetricSums, str | None]]:
        """Adds up the gradients of the rows' loss sums; metrics, and what is not finite.

        ``frozen``: the models that the rows have nothing of yet. A loss that is not finite makes
        the gradient NaN on all stages.
        """
        return self._run(loss_at_end(loss), rows, frozen, forward_only=False)

    def finish(self) -> None:
        """Runs the backward of rows that are still under way; a schedule leaves none."""

    @torch.no_grad()
    def evaluate(self, rows: Rows, loss: Loss, frozen: Collection[str]) -> list[MetricSums]:
        """The rows' metrics, without gradient."""
        return self._run(_loss(loss), rows, frozen, forward_only=True)

    @torch.no_grad()
    def frozen_logprobs(
        self, rows: Rows, temperature: float, frozen: Collection[str]
    ) -> list[FrozenLogprobs]:
        """What the frozen models say of each row."""

        def said(
            stage: StreamStage, row: MicroBatch, layout: SegmentLayout
        ) -> tuple[Tensor, FrozenLogprobs]:
            return torch.zeros(()), stage.frozen_logprobs(row, layout, temperature)

        return self._run(said, rows, frozen, forward_only=True, with_policy=False)

    @torch.no_grad()
    def policy_logprobs(self, rows: Rows, temperature: float) -> list[Tensor]:
        """The policy's of each row, float32 [N]."""

        def said(
            stage: StreamStage, row: MicroBatch, layout: SegmentLayout
        ) -> tuple[Tensor, Tensor]:
            return torch.zeros(()), stage.policy_logprobs(row, layout, temperature)[0]

        return self._run(said, rows, (), forward_only=True)

    def backward_of_nothing(self, scale: float) -> None:
        """A backward through all parameters whose gradient is ``scale`` times something."""

        def scaled(
            stage: StreamStage, row: MicroBatch, layout: SegmentLayout
        ) -> tuple[Tensor, None]:
            return stage.policy_logprobs(row, layout, 1.0)[0].sum() * scale, None

        self._run(scaled, [self._nothing()], (), forward_only=False)

    def _run(
        self,
        at_end: AtEnd,
        rows: Rows,
        frozen: Collection[str],
        *,
        forward_only: bool,
        with_policy: bool = True,
    ) -> list[Any]:
        chunks = self._streams(frozen, with_policy)
        config = chunks[0].config
        config.calculate_per_token_loss = True  # sums: divided by nothing
        added = self._num_missing(len(rows), forward_only)
        further = [self._nothing()] * added
        communicator = StreamCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            config,
            chunks[0].num_streams,
            self._add_sent,
        )
        schedule = (
            forward_backward_pipelining_with_interleaving
            if self.layout.chunks > 1
            else forward_backward_pipelining_without_interleaving
        )
        told = schedule(
            forward_step_func=_step(at_end),
            data_iterator=_iterators(rows, further, len(chunks)),
            model=chunks,
            num_microbatches=len(rows) + added,
            seq_length=ANY_LENGTH,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=_groups(),
        )
        return list(told)[: len(rows)]

    def _num_missing(self, num_rows: int, forward_only: bool) -> int:
        """Rows that a schedule with several chunks wants beside ``num_rows``: a multiple of the
        stages. With a backward pass, at least two for each: of one the first stages would have all
        behind them before they take a gradient, while the last already wait for that.
        """
        if self.layout.chunks == 1:
            return 0
        multiple = self.layout.pipeline
        least = multiple if forward_only else 2 * multiple
        return max(least - num_rows, -num_rows % multiple)

    def _nothing(self) -> MicroBatch:
        """A row without loss, of a length that tensor ranks can share."""
        return padded_row(row_of_nothing(), self.layout.row_multiple).to(self.device)

    def _streams(self, frozen: Collection[str], with_policy: bool) -> list[StreamStage]:
        """Of each chunk."""
        return [
            StreamStage(
                stage if self.policy is None else self.policy,
                stage,
                {name: self.frozen[name][number] for name in self.frozen if name in frozen},
                with_policy=with_policy,
                spans=self.spans,
            )
            for number, stage in enumerate(self.stages)
        ]

    def _add_sent(self, direction: str, num_bytes: int) -> None:
        self.sent_bytes[direction] += num_bytes


class SingleStage(Pipeline):
    """Without a pipeline: all layers are here, and rows go through them one by one."""

    def _run(
        self,
        at_end: AtEnd,
        rows: Rows,
        frozen: Collection[str],
        *,
        forward_only: bool,
        with_policy: bool = True,
    ) -> list[Any]:
        [stage] = self._streams(frozen, with_policy)
        policy: Any = self.policy  # DeepSpeed's engine
        said = []
        for row in rows:
            stage.set_input_tensor(None)
            output, told = at_end(stage, row, SegmentLayout(row.segments))
            if not forward_only:
                with self.spans.span("policy backward"):
                    policy.backward(output)
            said.append(told)
        return said


def _iterators(rows: Rows, further: Rows, num_chunks: int) -> list[Iterator[Row]]:
    """For each chunk. One takes each row when it is wanted: it may have to be waited for."""

    def with_layouts(some: Iterable[MicroBatch]) -> Iterator[Row]:
        return ((row, SegmentLayout(row.segments)) for row in some)

    if num_chunks == 1:
        return [with_layouts(rows)]
    shared = list(with_layouts([*rows, *further]))
    return [iter(shared) for _ in range(num_chunks)]


def loss_at_end(loss: Loss) -> AtEnd:
    """The loss sum; metrics, and what is not finite."""
    return _finite(_loss(loss))


def _loss(loss: Loss) -> AtEnd:
    def said(
        stage: StreamStage, row: MicroBatch, layout: SegmentLayout
    ) -> tuple[Tensor, MetricSums]:
        return stage.loss(row, layout, loss)

    return said


def _finite(at_end: AtEnd) -> AtEnd:
    """With NaN for a loss that is not finite: an infinite one may have a finite gradient."""

    def said(
        stage: StreamStage, row: MicroBatch, layout: SegmentLayout
    ) -> tuple[Tensor, tuple[Any, str | None]]:
        loss_sum, metrics = at_end(stage, row, layout)
        if bool(torch.isfinite(loss_sum)):
            return loss_sum, (metrics, None)
        return loss_sum * math.nan, (metrics, f"loss sum is {loss_sum.item()}")

    return said


def _step(at_end: AtEnd) -> Step:
    """What a schedule does with a row on a stage; ``at_end`` on the last."""

    def step(places: Iterator[Row], stage: StreamStage) -> tuple[Tensor, Any]:
        row, layout = next(places)
        if not stage.stage.is_last:
            return stage.hidden(row, layout), None
        output, said = at_end(stage, row, layout)
        return output, lambda tensor: (tensor, torch.tensor(1, dtype=torch.int), said)

    return step


def _groups() -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups
