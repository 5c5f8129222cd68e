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
    """One layer's buffers ``[S, H, L, d]``: attention reads each head's positions in one piece."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.buffers: list[Tensor] = []  # of keys and of values, from the first states on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates for states shaped ``[*, H, *, d]``; zeros, since masked garbage may be NaN."""
        self.buffers = [states[:0, :, :0] for states in (key_states, value_states)]
        self.is_initialized = True
        self.grow()

    def grow(self) -> None:
        """To the cache's capacity; what is held stays."""
        slots, positions = self._cache.capacity
        for index, buffer in enumerate(self.buffers):
            held_slots, heads, held_positions, size = buffer.shape
            larger = buffer.new_zeros(slots, heads, positions, size)
            larger[:held_slots, :, :held_positions] = buffer
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
        cache, (heads, size) = self._cache, states.shape[1::2]
        buffer.view(-1, size).index_copy_(0, cache.write_index(heads), states.reshape(-1, size))
        return buffer[: cache.num_rows, :, : cache.num_positions]

    def fill(
        self, slots: Tensor, source: Tensor, key_states: Tensor, value_states: Tensor, length: int
    ) -> None:
        """Of prefilled states ``[U, H, P, d]`` slot ``slots[i]`` gets prompt ``source[i]``.

        ``length``: of the longest of these; what is behind it is padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            copied = states[:, :, :length].index_select(0, source)
            buffer[:, :, :length].index_copy_(0, slots, copied)

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
        self._positions: Tensor | None = None  # int64 [B], of the new tokens
        self._write_index: dict[int, Tensor] = {}  # of the step, by number of heads
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self._columns = torch.arange(0, device=device)  # [L]
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
        for layer in self._slot_layers:
            layer.grow()

    def begin_step(self, positions: Tensor, longest: int) -> None:
        """Sequence ``b`` is going to write at ``positions[b]`` (int64 [B]); all see ``longest``."""
        self.num_rows, self.num_positions = positions.shape[0], longest
        self._positions, self._write_index = positions, {}

    def write_index(self, heads: int) -> Tensor:
        """int64 [B * H], where each head of each new token lies in a buffer's rows [S * H * L]."""
        assert self._positions is not None, "begin_step comes before the forward"
        if heads not in self._write_index:
            starts = torch.arange(self.num_rows * heads, device=self._device) * self.capacity[1]
            index = starts.view(-1, heads) + self._positions[:, None]
            self._write_index[heads] = index.flatten()
        return self._write_index[heads]

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
        return buffer[slot : slot + 1, :, :length].clone(memory_format=torch.contiguous_format)

    def copy(self, destination: Tensor, source: Tensor, length: int) -> None:
        """Slots ``destination`` get the first ``length`` positions of slots ``source``."""
        for layer in self._slot_layers:
            for buffer in layer.buffers:
                held = buffer[:, :, :length]
                held.index_copy_(0, destination, held.index_select(0, source))
