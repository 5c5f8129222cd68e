"""Rows through the pipeline stages: megatron-core's schedules, with sums in place of means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from easyrl.engines.base import MetricSums
from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.streams import Loss, StreamCommunicator, StreamStage
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.schema import FrozenLogprobs, MicroBatch

ANY_LENGTH = 1  # variable lengths: the shape of each message goes before it
Rows = Sequence[MicroBatch]  # on the device, the same on all ranks of the group
# of a row on the last stage: the loss sum, and what is told of it
AtEnd = Callable[[StreamStage, MicroBatch, SegmentLayout], tuple[Tensor, Any]]
Step = Callable[[Iterator[tuple[MicroBatch, SegmentLayout]], StreamStage], tuple[Tensor, Any]]


@dataclass
class Pipeline:
    """This process's stage: one chunk of layers, or several (interleaved).

    A schedule takes all its rows through all stages, forward and backward. All ranks of a group
    call it with the same rows; with chunks their number is a multiple of the stages.
    """

    layout: Layout
    chunks: list[StreamStage]
    sent_bytes: int = field(default=0, init=False)  # of hidden states and gradients

    @property
    def is_last(self) -> bool:
        """Whether losses and log-probabilities are made here."""
        return self.chunks[-1].stage.is_last

    def forward_backward(self, rows: Rows, loss: Loss) -> list[MetricSums]:
        """Adds up the gradients of the rows' loss sums; their metrics, on the last stage."""

        def said(
            stage: StreamStage, row: MicroBatch, layout: SegmentLayout
        ) -> tuple[Tensor, MetricSums]:
            return stage.loss(row, layout, loss)

        return self._run(said, rows, forward_only=False)

    @torch.no_grad()
    def frozen_logprobs(self, rows: Rows, temperature: float) -> list[FrozenLogprobs]:
        """What the frozen models say of each row, on the last stage."""

        def said(
            stage: StreamStage, row: MicroBatch, layout: SegmentLayout
        ) -> tuple[Tensor, FrozenLogprobs]:
            return torch.zeros(()), stage.frozen_logprobs(row, layout, temperature)

        return self._run(said, rows, forward_only=True)

    def _step(self, at_end: AtEnd) -> Step:
        """What a schedule does with a row on a stage; ``at_end`` on the last."""

        def step(
            places: Iterator[tuple[MicroBatch, SegmentLayout]], stage: StreamStage
        ) -> tuple[Tensor, Any]:
            row, layout = next(places)
            if not stage.stage.is_last:
                return stage.hidden(row, layout), None
            output, said = at_end(stage, row, layout)
            return output, lambda tensor: (tensor, torch.tensor(1, dtype=torch.int), said)

        return step

    def _run(self, at_end: AtEnd, rows: Rows, *, forward_only: bool) -> list[Any]:
        config = self.chunks[0].config
        config.calculate_per_token_loss = True  # sums: divided by nothing
        with_layouts = [(row, SegmentLayout(row.segments)) for row in rows]
        communicator = StreamCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            config,
            self.chunks[0].num_streams,
            self._add_sent,
        )
        schedule = (
            forward_backward_pipelining_with_interleaving
            if self.layout.chunks > 1
            else forward_backward_pipelining_without_interleaving
        )
        return list(
            schedule(
                forward_step_func=self._step(at_end),
                data_iterator=[iter(with_layouts) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(rows),
                seq_length=ANY_LENGTH,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=communicator,
                pg_collection=_groups(),
            )
        )

    def _add_sent(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes


def _groups() -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups
