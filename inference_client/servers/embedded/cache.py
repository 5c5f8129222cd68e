"""Keys and values of the running sequences, one slot per sequence, for any ``transformers`` model.

Shape legend: S slots, L positions, H key-value heads, d head size, B running sequences (slots
0..B-1), U prompts that were computed together, P positions of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

StatesOfLayers = Sequence[tuple[Tensor, Tensor]]  # per layer keys and values
LENGTH_STEP = 64  # slots grow by at least this many positions


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Of one prompt, among those that were computed together."""

    layers: StatesOfLayers  # [U, H, P, d] each, padded behind the shorter prompts
    index: int  # of the prompt, in U
    length: int

    def of_its_own(self) -> StatesOfLayers:
        """[1, H, length, d] each; the others' memory does not stay with it."""
        num_prompts, _, padded, _ = self.layers[0][0].shape
        if (num_prompts, padded) == (1, self.length):
            return self.layers
        one, own = slice(self.index, self.index + 1), slice(self.length)
        return [
            (keys[one, :, own].clone(), values[one, :, own].clone()) for keys, values in self.layers
        ]


class SlotLayer(CacheLayerMixin):
    """One layer's buffers ``[S, L, H, d]``; position-major: a new token is one row to write."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.buffers: list[Tensor] = []  # of keys and of values, from the first states on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for states shaped ``[*, H, *, d]``; zeros, since masked garbage may be NaN."""
        self.buffers = [states.transpose(1, 2)[:0, :0] for states in (key_states, value_states)]
        self.is_initialized = True
        self.grow()

    def grow(self) -> None:
        """To the cache's capacity; what is held stays."""
        for index, buffer in enumerate(self.buffers):
            larger = buffer.new_zeros(*self._cache.capacity, *buffer.shape[2:])
            larger[: buffer.shape[0], : buffer.shape[1]] = buffer
            self.buffers[index] = larger

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one new token per sequence (``[B, H, 1, d]``), returns ``[B, H, l, d]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        cache = self._cache
        assert cache.write_index is not None, "begin_step comes before the forward"
        rows = states.transpose(1, 2).reshape(cache.num_rows, -1)
        buffer.view(-1, rows.shape[1]).index_copy_(0, cache.write_index, rows)
        return buffer[: cache.num_rows, : cache.num_positions].transpose(1, 2)

    def fill(
        self, slots: Tensor, source: Tensor, key_states: Tensor, value_states: Tensor, length: int
    ) -> None:
        """Of prefilled states ``[U, H, P, d]`` slot ``slots[i]`` gets prompt ``source[i]``.

        ``length``: of the longest of these; what is behind it is padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[slots, :length] = states.transpose(1, 2)[source, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.num_positions, 0

    def get_seq_length(self) -> int:
        return self._cache.num_positions - 1

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The buffers of all layers; grows with the number of sequences and with their lengths."""

    def __init__(
        self, num_layers: int, max_slots: int, max_positions: int, device: torch.device
    ) -> None:
        self.capacity = (0, 0)  # S, L
        self.num_rows = 0  # B of the current decode step
        self.num_positions = 0  # that its attention sees, the longest sequence's
        self.write_index: Tensor | None = None  # int64 [B], slot * L + position of each new token
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self._columns = torch.arange(0, device=device)  # [L]
        self._slot_starts = torch.arange(0, device=device)  # [S], of their positions in buffers
        self._device = device
        self._max_slots = max_slots
        self._max_positions = max_positions

    def ensure(self, slots: int, positions: int) -> None:
        """Room for so many sequences of so many positions; what is held stays."""
        held_slots, held_positions = self.capacity
        if slots <= held_slots and positions <= held_positions:
            return
        if slots > held_slots:
            held_slots = min(max(slots, 2 * held_slots), self._max_slots)
        if positions > held_positions:
            wanted = max(positions, held_positions + max(LENGTH_STEP, held_positions // 4))
            wanted = -(-wanted // LENGTH_STEP) * LENGTH_STEP
            held_positions = max(positions, min(wanted, self._max_positions))
        self.capacity = (held_slots, held_positions)
        self._columns = torch.arange(held_positions, device=self._device)
        self._slot_starts = torch.arange(held_slots, device=self._device) * held_positions
        for layer in self._slot_layers:
            layer.grow()

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Sequence ``b`` is going to write at ``positions[b]`` (int64 [B]); all see ``longest``."""
        self.num_rows, self.num_positions = positions.shape[0], longest
        self.write_index = self._slot_starts[: self.num_rows] + positions

    def unwritten(self, positions: Tensor) -> Tensor:
        """Bool [B, L], the positions behind each sequence's own (int64 [B])."""
        return self._columns[: self.num_positions] > positions[:, None]

    def fill(self, slots: Tensor, source: Tensor, prefilled: StatesOfLayers, length: int) -> None:
        """Copies a prefill's states into slots (see ``SlotLayer.fill``)."""
        for layer, (keys, values) in zip(self._slot_layers, prefilled, strict=True):
            layer.fill(slots, source, keys, values, length)

    def read(self, slot: int, length: int) -> StatesOfLayers:
        """A copy of the slot's first ``length`` positions, [1, H, length, d] each."""
        return [
            (self._read(keys, slot, length), self._read(values, slot, length))
            for keys, values in (layer.buffers for layer in self._slot_layers)
        ]

    @staticmethod
    def _read(buffer: Tensor, slot: int, length: int) -> Tensor:
        held = buffer[slot : slot + 1, :length].transpose(1, 2)
        return held.clone(memory_format=torch.contiguous_format)

    def copy(self, destination: Tensor, source: Tensor, length: int) -> None:
        """Slots ``destination`` get the first ``length`` positions of slots ``source``."""
        for layer in self._slot_layers:
            for buffer in layer.buffers:
                buffer[destination, :length] = buffer[source, :length]
