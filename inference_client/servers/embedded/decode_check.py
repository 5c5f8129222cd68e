"""Whether decoding from the slots gives what a model's own forward says, found out by computing.

Two random sequences of unequal lengths are computed whole, and again with their last token decoded
behind keys and values in slots. A window is made as short as these sequences need meanwhile.

Shape legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from easyrl.inference_client.servers.embedded.attention import SharedPrompts
from easyrl.inference_client.servers.embedded.cache import SlotCache
from easyrl.inference_client.servers.embedded.decode_forward import DecodeForward
from easyrl.inference_client.servers.embedded.decode_masks import DecodeMasks
from easyrl.inference_client.servers.embedded.prefill import (
    PromptCache,
    compute_states,
    states_of_layers,
)

logger = logging.getLogger(__name__)

LENGTHS = (14, 9)  # tokens of the sequences
WINDOW = 5  # shorter than both

# tokens int64 [B], positions int64 [B], mask, cache; logits [B, V]
Decode = Callable[[Tensor, Tensor, Any, SlotCache], Tensor]


class NotServed(ValueError):
    """The model's decode step does not say what its forward says; the message tells why."""


def check_decoding(model: PreTrainedModel, masks: DecodeMasks) -> None:
    """Of the model's own forward behind keys and values in slots. Raises ``NotServed``."""

    def decode(tokens: Tensor, positions: Tensor, mask: Any, cache: SlotCache) -> Tensor:
        output = model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, 0]
        return logits

    _check(model, masks, decode)


def checked_decode_forward(model: PreTrainedModel, masks: DecodeMasks) -> DecodeForward | None:
    """The forward of few operations, where the model is made of the blocks that it knows and it
    says what the model says. To be asked for before anybody keeps the parameters' memory.
    """
    if masks.window is not None:
        return None
    try:
        forward = DecodeForward(model)
        nothing_apart = SharedPrompts.of([], model.device)
        _check(model, masks, lambda t, p, mask, cache: forward(t, p, mask, cache, nothing_apart))
    except Exception as error:  # another kind of model
        logger.info("decoded by the modules of a %s: %s", type(model).__name__, error)
        return None
    return forward


@torch.no_grad()
def _check(model: PreTrainedModel, masks: DecodeMasks, decode: Decode) -> None:
    """Compares logits up to the square root of the dtype's precision (float32's at best), of the
    largest one. Raises ``NotServed``.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    sequences = [
        torch.randint(vocab_size, (length,), generator=generator).to(model.device)
        for length in LENGTHS
    ]
    try:
        with _short_window(model, masks) as short:
            expected = [model(input_ids=tokens[None]).logits[0, -1] for tokens in sequences]
            found = _decoded(model, short, sequences, decode)
    except Exception as error:  # whatever a model of another kind makes of these calls
        raise NotServed(f"it cannot be decoded token by token ({error})") from error
    precision = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    for own, decoded in zip(expected, found, strict=True):
        off = float((own.float() - decoded.float()).abs().max() / own.abs().max())
        if not off <= precision:  # NaN too
            raise NotServed(
                f"decoding token by token is off by {off:.1e} of the largest logit, "
                f"{precision:.0e} is tolerated"
            )


def _decoded(
    model: PreTrainedModel, masks: DecodeMasks, sequences: list[Tensor], decode: Decode
) -> Tensor:
    """Logits [2, V] behind the last tokens, all before them in slots."""
    cache: SlotCache | None = None
    for slot, tokens in enumerate(sequences):
        prefilled = PromptCache(model)
        compute_states(model, tokens[None, :-1], prefilled)
        layers = states_of_layers(prefilled)
        if cache is None:
            cache = SlotCache(len(layers), len(sequences), max(LENGTHS), model.device)
            cache.ensure(len(sequences), max(LENGTHS))
        slots = torch.tensor([slot], device=model.device)
        cache.fill(slots, torch.zeros_like(slots), layers, len(tokens) - 1)
    assert cache is not None
    newest = torch.stack([tokens[-1] for tokens in sequences])
    positions = torch.tensor([len(tokens) - 1 for tokens in sequences], device=model.device)
    cache.begin_step(positions, max(LENGTHS))
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    mask = masks.of_step(zero, cache.unwritten(positions), positions)
    return decode(newest, positions, mask, cache)


@contextmanager
def _short_window(model: PreTrainedModel, masks: DecodeMasks) -> Iterator[DecodeMasks]:
    """Inside, the model's own masks have a window of ``WINDOW``: it reads the size from its
    configuration at each forward."""
    if masks.window is None:
        yield masks
        return
    config: Any = model.config.get_text_config()
    before = config.sliding_window
    config.sliding_window = min(WINDOW, before)
    try:
        yield replace(masks, window=config.sliding_window)
    finally:
        config.sliding_window = before
