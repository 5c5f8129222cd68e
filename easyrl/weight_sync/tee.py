"""A tee for tensors: one pass over the weights feeds the host's copy and a broadcast."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class TeeClosed(RuntimeError):
    """The pass over the weights goes on without the broadcast."""


class TensorTee:
    """Hands each tensor of the main thread's pass to a sender's thread.

    The pass is a collective of the trainer's ranks. It belongs to the main thread, which therefore
    goes on to the last tensor whatever becomes of the sender.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: tuple[str, Tensor] | None = None
        self._ended = False
        self._closed = False

    def pass_on(self, named_weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``named_weights``, each also offered to the sender.

        Consumes: the engine's tensors. Waits for: the sender to have copied a tensor before the
        next one is asked for. Is unblocked by: the copy, or ``close``.
        """
        for item in named_weights:
            with self._changed:
                self._offered = item
                self._changed.notify_all()
            yield item  # is written to the host's copy while the sender makes its own
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._offered is None)
                self._offered = None
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def copies(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the pass on ``device``, for the sender's thread.

        Copied there, on the stream that the sender works on: the allocator gives a tensor's memory
        to the next one of its stream. Raises ``TeeClosed``.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ended or bool(self._offered))
                if self._offered is None or self._closed:
                    break
                name, weight = self._offered
                copy = weight.to(device, copy=True)
                self._offered = None
                self._changed.notify_all()
            yield name, copy
        if not self._ended:
            raise TeeClosed("the broadcast was given up")

    def close(self) -> None:
        """The pass waits for no sender any more. Safe to call twice, from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
