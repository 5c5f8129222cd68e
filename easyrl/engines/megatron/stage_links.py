"""Hidden states to the next pipeline stage and gradients back, a message at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from easyrl.engines.megatron.layout import Place

MOST_UNDER_WAY = 4  # messages that are sent and may not have arrived, for each stage


class StageLinks:
    """This process's links to the stages before and behind its own. Collective over all processes.

    What is sent is not waited for: a stage that sends a row on may be sent a gradient meanwhile.
    Each direction has a process group of its own, because NCCL keeps the messages between two
    processes of a group in one order, and two that send to each other would wait for ever.
    """

    def __init__(self, place: Place) -> None:
        layout, self.stage = place.layout, place.stage
        self.num_stages = layout.pipeline
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        for tensor, data in product(range(layout.tensor), range(layout.data)):
            ranks = [layout.rank(tensor, data, stage) for stage in range(layout.pipeline)]
            groups = [dist.new_group(ranks) for _ in range(2)]  # all processes make all
            if (tensor, data) == (place.tensor, place.data):
                self._ranks, (self._forward, self._backward) = ranks, groups

    def send_forward(self, hidden: Tensor) -> None:
        self._send(hidden, self._ranks[self.stage + 1], self._forward)

    def receive_forward(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        received = torch.empty(tuple(shape), dtype=dtype, device=device)
        _receive(received, self._ranks[self.stage - 1], self._forward)
        return received

    def send_backward(self, gradient: Tensor) -> None:
        self._send(gradient, self._ranks[self.stage - 1], self._backward)

    def receive_backward(self, output: Tensor) -> Tensor:
        """The gradient of what was sent forward."""
        gradient = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        _receive(gradient, self._ranks[self.stage + 1], self._backward)
        return gradient

    def wait_for_sent(self) -> None:
        """Until all that was sent has arrived."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _send(self, tensor: Tensor, to: int, group: Any) -> None:
        tensor = tensor.detach().contiguous()
        self._under_way.append((dist.isend(tensor, to, group=group), tensor))
        if len(self._under_way) > MOST_UNDER_WAY * self.num_stages:
            self._under_way.popleft()[0].wait()


def _receive(into: Tensor, sender: int, group: Any) -> None:
    work = dist.irecv(into, sender, group=group)
    assert work is not None
    work.wait()
