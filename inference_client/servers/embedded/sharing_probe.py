"""Whether a model's attention can read prompts that are held apart, found out by computing.

A random prompt is prefilled and one token decoded behind it twice, with the model's own attention
and with the prompt held apart, and the logits are compared.

Shape legend: B rows, P positions of the prompt, H key-value heads, d head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from easyrl.inference_client.servers.embedded.attention import NAME, ProbedStep, SharedPrompts
from easyrl.inference_client.servers.embedded.cache import SlotCache, StatesOfLayers
from easyrl.inference_client.servers.embedded.prefill import (
    PromptCache,
    compute_states,
    states_of_layers,
)
from easyrl.inference_client.servers.embedded.prompts import MIN_APART

NUM_ROWS = 2  # B


@torch.no_grad()
def takes_shared_prompts(model: PreTrainedModel, max_model_len: int) -> bool:
    """Whether the model attends through ``attention.decode_attention`` from now on, for sequences
    of at most ``max_model_len`` tokens.

    Not if any layer attends in another way (written without ``AttentionInterface``, with biases,
    sinks or a mask of its own, over other keys than the cached ones), if the logits are apart, or
    if the model refuses to be probed: then it stays as it is.
    """
    before = model.config._attn_implementation
    try:
        is_right = _are_logits_the_same(model, max_model_len)
    except Exception:  # whatever a model of another kind makes of these calls
        is_right = False
    if not is_right:
        model.set_attn_implementation(before)
    return is_right


def _are_logits_the_same(model: PreTrainedModel, max_model_len: int) -> bool:
    """Up to the square root of the dtype's precision (float32's at best), of the largest logit."""
    prompt, newest = _tokens(model)
    cache = PromptCache(model)
    compute_states(model, prompt, cache)
    layers = states_of_layers(cache)
    expected = _decode_as_usual(model, layers, newest)
    model.set_attn_implementation(NAME)
    step = ProbedStep(SharedPrompts.of([layers] * NUM_ROWS, model.device), max_model_len)
    found = _decode_apart(model, step, newest)
    if step.num_layers != len(layers):
        return False
    precision = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    largest = float(expected.abs().max())
    return bool((found - expected).abs().max() <= precision**0.5 * largest)


def _tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """A prompt [1, P] and one token for each row [B, 1]."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, (MIN_APART + NUM_ROWS,), generator=generator)
    prompt, newest = tokens.to(model.device).split([MIN_APART, NUM_ROWS])
    return prompt[None], newest[:, None]


def _decode_as_usual(model: PreTrainedModel, layers: StatesOfLayers, newest: Tensor) -> Tensor:
    """Logits float32 [B, V]."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys.expand(NUM_ROWS, -1, -1, -1), values.expand(NUM_ROWS, -1, -1, -1), number)
    output = model(
        input_ids=newest,
        position_ids=torch.full_like(newest, MIN_APART),
        past_key_values=cache,
        use_cache=True,
    )
    return output.logits[:, -1].float()


def _decode_apart(model: PreTrainedModel, step: ProbedStep, newest: Tensor) -> Tensor:
    """The same with slots that hold nothing but the new token, and a place that is not written."""
    num_layers = len(step.shared.prompts[0][0])
    cache = SlotCache(num_layers, NUM_ROWS, 2, model.device)
    positions = torch.zeros(NUM_ROWS, dtype=torch.int64, device=model.device)
    cache.ensure(NUM_ROWS, 2)
    cache.begin_step(positions, 2)
    mask = torch.zeros((), dtype=model.dtype, device=model.device)
    mask = mask.masked_fill(cache.unwritten(positions), -torch.inf)
    output = model(
        input_ids=newest,
        position_ids=torch.full_like(newest, MIN_APART),
        attention_mask=mask[:, None, None],
        past_key_values=cache,
        use_cache=True,
        shared_prompts=step,
    )
    return output.logits[:, -1].float()
