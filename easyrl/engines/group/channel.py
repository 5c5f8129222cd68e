"""What the processes of a model-parallel group tell each other, over a CPU group of their own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from easyrl.engines.group.codec import decode, encode
from easyrl.runtime.gloo_wait import LONGEST_WAIT, wait_with_signals
from easyrl.runtime.lost_process import LostProcess

END_S = 5.0  # a follower that does not listen any more does not keep the head
LONGEST_PAUSE_S = 0.005
MOST_ANSWERS = 64  # of a follower that the head has not fetched; more than stages of a pipeline


class GroupLost(LostProcess):
    """A process of the model-parallel group is gone."""


class GroupChannel:
    """From the head to its followers, and back from one or all of them.

    ``tell`` and ``answer`` do not wait until they are heard; methods raise ``GroupLost``, if of a
    message that was sent before. One thread of each process uses it. All members make it, at the
    same place among the process groups that they make.

    Args:
        members: ranks of the group's processes; the first is the head.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        self._group = dist.new_group(
            self._members, backend="gloo", timeout=LONGEST_WAIT, use_local_synchronization=True
        )
        self.is_head = dist.get_rank() == self.head
        self._telling: deque[Any] = deque()
        self._answering: deque[tuple[Any, Tensor]] = deque()

    @property
    def head(self) -> int:
        return self._members[0]

    def tell(self, message: Any) -> None:
        """From the head to all followers, which ``hear`` it."""
        while self._telling and self._telling[0].is_completed():
            self._wait(self._telling.popleft())
        payload = _bytes(message)
        for part in (_size(payload), payload):
            self._telling.append(dist.broadcast(part, self.head, group=self._group, async_op=True))

    def tell_last(self, message: Any) -> None:
        """``tell``, where followers may be gone: it waits until they have heard, and not for long.

        The channel ends with it.
        """
        with suppress(GroupLost, TimeoutError):
            self.tell(message)
            while self._telling:
                self._wait(self._telling.popleft(), END_S)

    def hear(self) -> Any:
        """What the head told next."""
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(dist.broadcast(size, self.head, group=self._group, async_op=True))
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._wait(dist.broadcast(payload, self.head, group=self._group, async_op=True))
        return decode(payload.numpy().tobytes())

    def answer(self, message: Any) -> None:
        """From a follower to the head, which ``fetch``es it."""
        payload = _bytes(message)
        for part in (_size(payload), payload):
            self._answering.append((dist.isend(part, self.head, group=self._group), part))
        while len(self._answering) > 2 * MOST_ANSWERS:
            _finish(self._answering.popleft()[0])

    def fetch(self, follower: int) -> Any:
        """What the process of this rank answered."""
        size = torch.zeros(1, dtype=torch.int64)
        _finish(dist.irecv(size, follower, group=self._group))
        payload = torch.empty(int(size), dtype=torch.uint8)
        _finish(dist.irecv(payload, follower, group=self._group))
        return decode(payload.numpy().tobytes())

    def fetch_all(self) -> list[Any]:
        """What each follower answered."""
        return [self.fetch(member) for member in self._members[1:]]

    def _wait(self, work: Any, within_s: float = math.inf) -> None:
        try:
            wait_with_signals(work, self._group, longest_pause_s=LONGEST_PAUSE_S, within_s=within_s)
        except RuntimeError as error:
            raise GroupLost(str(error)) from error


def _finish(work: Any) -> None:
    """Of one message Gloo says only here that it is there; who answers is at work on it."""
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupLost(str(error)) from error


def _bytes(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)


def _size(payload: Tensor) -> Tensor:
    return torch.tensor([len(payload)])
