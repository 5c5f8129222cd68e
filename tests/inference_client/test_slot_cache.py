"""The embedded server's slots against a list of positions for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from easyrl.inference_client.servers.embedded.cache import SlotCache

HEADS = (2, 3)  # of each layer
SIZES = (4, 6)  # of keys and of values


class Reference:
    """What each layer holds of a sequence, position by position: keys and values [H, L, d]."""

    def __init__(self) -> None:
        self.states = [[torch.zeros(h, 0, d) for d in SIZES] for h in HEADS]

    def append(self, layer: int, new: list[Tensor]) -> None:
        """Keys and values [H, P, d]."""
        held = self.states[layer]
        self.states[layer] = [torch.cat([a, b], 1) for a, b in zip(held, new, strict=True)]

    @property
    def length(self) -> int:
        return self.states[0][0].shape[1]


def step(cache: SlotCache, references: list[Reference]) -> None:
    """One more token of each sequence; what every layer gives is compared."""
    positions = torch.tensor([reference.length for reference in references])
    longest = int(positions.max()) + 1
    cache.ensure(len(references), longest)
    cache.begin_step(positions, longest)
    for layer, heads in enumerate(HEADS):
        new = [torch.randn(len(references), heads, 1, d) for d in SIZES]
        told = cache.update(new[0], new[1], layer)
        for row, reference in enumerate(references):
            reference.append(layer, [states[row] for states in new])
            for got, expected in zip(told, reference.states[layer], strict=True):
                assert got.shape[1:] == (heads, longest, expected.shape[2])
                assert torch.equal(got[row, :, : expected.shape[1]], expected)


def prefill(cache: SlotCache, references: list[Reference], lengths: list[int]) -> None:
    """Prompts of these lengths, computed together, each in the slot of its own number."""
    padded = max(lengths)
    cache.ensure(len(lengths), padded + 1)
    layers = [tuple(torch.randn(len(lengths), h, padded, d) for d in SIZES) for h in HEADS]
    slots = torch.arange(len(lengths))
    cache.fill(slots, slots, layers, padded)  # type: ignore[arg-type]
    for row, length in enumerate(lengths):
        for layer, states in enumerate(layers):
            references[row].append(layer, [each[row, :, :length] for each in states])


def test_slots_hold_what_was_written_however_they_grow_and_move() -> None:
    torch.manual_seed(0)
    cache = SlotCache(len(HEADS), max_slots=16, max_positions=300, device=torch.device("cpu"))
    references = [Reference() for _ in range(3)]
    prefill(cache, references, [5, 1, 9])
    for _ in range(150):  # beyond two capacities
        step(cache, references)
    references += [Reference() for _ in range(4)]  # more slots while others are in use
    for _ in range(70):
        step(cache, references)
    for layer, (keys, values) in enumerate(cache.read(2, 100)):
        for got, expected in zip((keys, values), references[2].states[layer], strict=True):
            assert got.is_contiguous() and torch.equal(got[0], expected[:, :100])
    references[0] = references.pop()  # the last one's slot moves to where the first one ended
    last = torch.tensor([len(references)])
    cache.copy(torch.tensor([0]), last, references[0].length)
    for _ in range(3):
        step(cache, references)
