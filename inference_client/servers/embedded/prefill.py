"""Prefill in pieces: prompts that wait until their keys and values are computed.

A sequence's prompt but its last token is computed, once for all that have the same; the last token
then goes through the same decode step as everyone's newest token. So no logits are needed here: the
forward ends as soon as the last layer has its keys and values.

Shape legend: U prompts that are computed together, H key-value heads, P positions, d head size.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from easyrl.inference_client.servers.embedded.cache import Prefilled, StatesOfLayers
from easyrl.inference_client.servers.embedded.requests import Sequence

MOST_PADDING = 0.25  # of the tokens of prompts that are computed together
FEW_TOKENS = 128  # about what a forward of their own would cost


class _AllThere(Exception):
    """Every layer's keys and values are computed."""


class PromptCache(DynamicCache):
    """Keys and values of prompts; ends a forward (``compute_states``) when all have come."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._last = int(model.config.get_text_config().num_hidden_layers) - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last:
            raise _AllThere
        return states


@torch.no_grad()
def compute_states(model: PreTrainedModel, tokens: Tensor, cache: PromptCache) -> None:
    """Into ``cache``, of ``tokens`` int64 [U, P], which follow what it holds.

    The last layer's attention and MLP, which nothing but logits depends on, are left out: the
    forward is ended from where that layer hands over what is to be kept. A model whose last layer
    keeps nothing, as where layers share keys and values, runs to its end.
    """
    start = cache.get_seq_length()
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    with suppress(_AllThere):
        model.base_model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True
        )


class Prefill:
    """Sequences whose prompts are not computed yet, first come, first served."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_tokens = 0  # computed since the start
        self._model = model
        self._waiting: dict[bytes, list[Sequence]] = {}  # by prompt; the first may be begun
        self._begun = PromptCache(model)  # what is computed of the first

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for group in self._waiting.values() for sequence in group]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, sequence: Sequence) -> None:
        self._waiting.setdefault(sequence.prompt_key, []).append(sequence)

    def remove(self, sequences: Set[Sequence]) -> None:
        for key, group in list(self._waiting.items()):
            group[:] = [sequence for sequence in group if sequence not in sequences]
            if not group:
                if key == next(iter(self._waiting)):
                    self.restart()
                del self._waiting[key]

    def restart(self) -> None:
        """What is begun is computed again from its beginning."""
        self._begun = PromptCache(self._model)

    def run(self, max_tokens: int) -> list[tuple[list[Sequence], Prefilled]]:
        """One forward over at most so many tokens; gives the sequences that can go on."""
        lengths = {key: len(group[0].prompt) - 1 for key, group in self._waiting.items()}
        first = next(iter(lengths.values()))
        if first > max_tokens or self._begun.get_seq_length():
            return self._run_piece(max_tokens)
        chosen: list[bytes] = []
        longest = total = 0  # all are padded to the longest: alike lengths go together
        for key in sorted(lengths, key=lambda key: abs(lengths[key] - first)):
            longest, total = max(longest, lengths[key]), total + lengths[key]
            padded = longest * (len(chosen) + 1)
            if padded > max_tokens or padded - total > max(FEW_TOKENS, MOST_PADDING * total):
                break
            chosen.append(key)
        groups = [self._waiting.pop(key) for key in chosen]
        return self._run_whole(groups)

    def _run_piece(self, max_tokens: int) -> list[tuple[list[Sequence], Prefilled]]:
        key, group = next(iter(self._waiting.items()))
        start = self._begun.get_seq_length()
        prompt = group[0].prompt[:-1]
        piece = prompt[start : start + max_tokens]
        self._forward(piece[None], self._begun)
        self.num_tokens += len(piece)
        if start + len(piece) < len(prompt):
            return []
        del self._waiting[key]
        layers = states_of_layers(self._begun)
        self.restart()
        return [(group, Prefilled(layers, 0, len(prompt)))]

    def _run_whole(self, groups: list[list[Sequence]]) -> list[tuple[list[Sequence], Prefilled]]:
        """Right padded: padding is behind what is causal."""
        prompts = [group[0].prompt[:-1] for group in groups]
        padded = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = prompt
        cache = PromptCache(self._model)
        self._forward(padded, cache)
        self.num_tokens += sum(map(len, prompts))
        layers = states_of_layers(cache)
        return [
            (group, Prefilled(layers, i, len(prompt)))
            for i, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
        ]

    def _forward(self, tokens: np.ndarray, cache: PromptCache) -> None:
        compute_states(self._model, torch.from_numpy(tokens).to(self._model.device), cache)


def states_of_layers(cache: DynamicCache) -> StatesOfLayers:
    """Keys and values [U, H, P, d] of each layer."""
    found = []
    for layer in cache.layers:
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None and layer.values is not None
        found.append((layer.keys, layer.values))
    return found
