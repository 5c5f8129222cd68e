"""1F1B for rows that come one by one: one pipeline schedule for all of an update."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums
from easyrl.engines.megatron.pipeline import AtEnd, Pipeline, Rows, loss_at_end
from easyrl.engines.megatron.stage_links import StageLinks
from easyrl.engines.megatron.streams import Loss
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.schema import MicroBatch


class InFlight(NamedTuple):
    """A row that a stage has run forward and not yet backward."""

    num_tokens: int  # that this process has of it
    received: Tensor | None  # hidden states of all streams; None on the first stage
    output: Tensor  # the policy's part of what went to the next stage; on the last the loss sum


@dataclass(kw_only=True)
class OpenSchedule(Pipeline):
    """A pipeline that a row enters as soon as it is there, without an end that is known before.

    Behind a row's forward each stage runs the backward of an earlier row, of as many before as
    there are stages behind it: the order of 1F1B (Narayanan et al. 2021, §2.2), and its gradients
    to the bit. The rows behind which none has come yet stay in flight until the next, or
    ``finish``. For one chunk of layers a stage.
    """

    links: StageLinks
    _in_flight: deque[InFlight] = field(default_factory=deque)

    def forward_backward(
        self, rows: Rows, loss: Loss, frozen: Collection[str]
    ) -> list[tuple[MetricSums, str | None]]:
        """As ``Pipeline``'s; on stages before the last, gradients may come later."""
        at_end = loss_at_end(loss)
        num_stages_behind = self.links.num_stages - 1 - self.links.stage
        told = []
        for row in rows:
            said = self._forward(row, at_end, frozen)
            if said is not None:
                told.append(said)
            if len(self._in_flight) > num_stages_behind:
                self._backward()
        return told

    def finish(self) -> None:
        while self._in_flight:
            self._backward()
        self.links.wait_for_sent()

    def _forward(self, row: MicroBatch, at_end: AtEnd, frozen: Collection[str]) -> Any:
        """What is told of the row, on the last stage."""
        (stage,) = self._streams(frozen, with_policy=True)
        layout, received = SegmentLayout(row.segments), None
        num_tokens, config = row.num_tokens // self.layout.row_multiple, stage.config
        if not stage.stage.is_first:
            shape = (stage.num_streams * num_tokens, 1, config.hidden_size)
            received = self.links.receive_forward(shape, config.params_dtype, self.device)
            received.requires_grad_()
        stage.set_input_tensor(received)
        if stage.stage.is_last:
            output, said = at_end(stage, row, layout)
        else:
            hidden, said = stage.hidden(row, layout), None
            self._add_sent("forward", hidden.nbytes)
            self.links.send_forward(hidden)
            output = hidden[:num_tokens]
        self._in_flight.append(InFlight(num_tokens, received, output))
        return said

    def _backward(self) -> None:
        """Of the row that has been in flight for longest."""
        num_tokens, received, output = self._in_flight.popleft()
        is_last = self.links.stage == self.links.num_stages - 1
        gradient = None if is_last else self.links.receive_backward(output)
        with self.spans.span("policy backward"):
            torch.autograd.backward(output, gradient)
        if received is None:
            return
        assert received.grad is not None
        own = received.grad[:num_tokens]
        self._add_sent("backward", own.nbytes)
        self.links.send_backward(own)
