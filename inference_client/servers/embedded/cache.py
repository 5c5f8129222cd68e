"""Keys and values of the running sequences, one slot per sequence, for any ``transformers`` model.

Shape legend: S slots, L positions, H key-value heads, d head size, B running sequences (slots
0..B-1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LENGTH_STEP = 64  # slots grow by at least this many positions


@dataclass(slots=True)
class Window:
    """The buffers' size, and what the current decode step writes and reads; of all layers."""

    capacity: tuple[int, int] = (0, 0)  # S, L
    num_rows: int = 0  # B
    num_positions: int = 0  # positions that attention sees, the longest sequence's
    write_index: Tensor | None = None  # int64 [B], slot * L + position of each new token


class SlotLayer(CacheLayerMixin):
    """One layer's buffers ``[S, L, H, d]``; position-major: a new token is one row to write."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for states shaped ``[*, H, *, d]``; zeros, since masked garbage may be NaN."""
        self.keys = key_states.transpose(1, 2)[:0, :0]
        self.values = value_states.transpose(1, 2)[:0, :0]
        self.is_initialized = True
        self.grow()

    def grow(self) -> None:
        """To the window's capacity; what is held stays."""
        if self.keys is not None and self.values is not None:
            self.keys = _enlarged(self.keys, self._window.capacity)
            self.values = _enlarged(self.values, self._window.capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one new token per sequence (``[B, H, 1, d]``), returns ``[B, H, l, d]``."""
        keys, values = self._buffers(key_states, value_states)
        return self._write(keys, key_states), self._write(values, value_states)

    def _buffers(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        window = self._window
        assert window.write_index is not None, "begin_step comes before the forward"
        rows = states.transpose(1, 2).reshape(window.num_rows, -1)
        buffer.view(-1, rows.shape[1]).index_copy_(0, window.write_index, rows)
        return buffer[: window.num_rows, : window.num_positions].transpose(1, 2)

    def fill(self, slots: Tensor, source: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        """Prefilled states ``[U, H, P, d]``: slot ``slots[i]`` gets prompt ``source[i]``."""
        keys, values = self._buffers(key_states, value_states)
        length = key_states.shape[2]
        keys[slots, :length] = key_states.transpose(1, 2)[source]
        values[slots, :length] = value_states.transpose(1, 2)[source]

    def copy(self, destination: Tensor, source: Tensor, length: int) -> None:
        """Slots ``destination`` get the first ``length`` positions of slots ``source``."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[destination, :length] = buffer[source, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.num_positions, 0

    def get_seq_length(self) -> int:
        return self._window.num_positions - 1

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The buffers of all layers; grows with the number of sequences and with their lengths."""

    def __init__(self, num_layers: int, max_slots: int, max_positions: int) -> None:
        self._window = Window()
        self._slot_layers = [SlotLayer(self._window) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self._max_slots = max_slots
        self._max_positions = max_positions

    def ensure(self, slots: int, positions: int) -> None:
        """Room for so many sequences of so many positions; what is held stays."""
        held_slots, held_positions = self._window.capacity
        if slots <= held_slots and positions <= held_positions:
            return
        if slots > held_slots:
            held_slots = min(max(slots, 2 * held_slots), self._max_slots)
        if positions > held_positions:
            wanted = max(positions, held_positions + max(LENGTH_STEP, held_positions // 4))
            wanted = -(-wanted // LENGTH_STEP) * LENGTH_STEP
            held_positions = max(positions, min(wanted, self._max_positions))
        self._window.capacity = (held_slots, held_positions)
        for layer in self._slot_layers:
            layer.grow()

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Sequence ``b`` is going to write at ``positions[b]`` (int64 [B]); all see ``longest``."""
        self._window.num_rows = positions.shape[0]
        self._window.num_positions = longest
        slots = torch.arange(positions.shape[0], device=positions.device)
        self._window.write_index = slots * self._window.capacity[1] + positions

    def fill(self, slots: Tensor, source: Tensor, prefilled: Cache) -> None:
        """Copies a prefill's states into slots (see ``SlotLayer.fill``)."""
        for layer, new in zip(self._slot_layers, prefilled.layers, strict=True):
            assert isinstance(new, CacheLayerMixin)
            assert new.keys is not None and new.values is not None
            layer.fill(slots, source, new.keys, new.values)

    def copy(self, destination: Tensor, source: Tensor, length: int) -> None:
        for layer in self._slot_layers:
            layer.copy(destination, source, length)


def _enlarged(buffer: Tensor, capacity: tuple[int, int]) -> Tensor:
    slots, positions = buffer.shape[:2]
    larger = buffer.new_zeros(*capacity, *buffer.shape[2:])
    larger[:slots, :positions] = buffer
    return larger
