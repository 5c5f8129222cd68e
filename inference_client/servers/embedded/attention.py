"""Attention of a decode step that reads a shared prompt once for all of its samples.

Attention over a prompt's keys and over a sequence's own is computed apart and merged by the two
log-sum-exps (as in training, ``kernels/attention/merged_attention.py``). The queries of all samples
of a prompt make one matrix product per key-value head with its keys; no key or value is copied, for
none of the samples and for none of the query heads that share a key-value head.

Models call it through transformers' ``AttentionInterface``.

Shape legend: B sequences, M of them with a prompt held apart, H key-value heads, R query heads of
each, d head size, P positions of a prompt, L of the sequences' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from easyrl.inference_client.servers.embedded.prompts import PromptStates, StatesOfLayers
from easyrl.kernels.attention.partial_attention import forward as attention_with_logsumexp
from easyrl.kernels.attention.partial_attention import softmax_dtype

NAME = "easyrl_shared_prompt_decode"
# keywords of the interface that say nothing of what is computed, or what is always so here
_HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions"}


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """The prompts that are held apart, and which rows of the step have them."""

    prompts: list[tuple[StatesOfLayers, slice]]  # and where in ``rows`` its sequences are
    rows: Tensor  # int64 [M], those of one prompt behind one another

    @classmethod
    def of(cls, states: list[PromptStates | None], device: torch.device) -> SharedPrompts:
        """Of the step's sequences, by row."""
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(states):
            if prompt is not None and prompt.is_apart:
                members.setdefault(id(prompt), []).append(row)
        prompts: list[tuple[StatesOfLayers, slice]] = []
        rows: list[int] = []
        for of_one in members.values():
            prompt = states[of_one[0]]
            assert prompt is not None
            prompts.append((prompt.layers, slice(len(rows), len(rows) + len(of_one))))
            rows += of_one
        return cls(prompts, torch.tensor(rows, dtype=torch.int64, device=device))


class _Probe:
    """Counts the layers whose attention is plain and gets what it needs."""

    def __init__(self) -> None:
        self.num_plain = 0


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    shared: SharedPrompts,
    layer: int,
    scale: float,
) -> Tensor:
    """Attention of one new token per sequence over its prompt and its own tokens, [B, H, R, d].

    Args:
        query: [B, H, R, d].
        key, value: [B, H, L, d], the sequences' own.
        mask: [B, 1, 1, L], added to the scores; each sequence sees one position at least.
    """
    output, logsumexp = _masked_attention(query, key, value, mask, scale)
    if not shared.prompts:
        return output
    queries = query[shared.rows].transpose(0, 1)  # [H, M, R, d]
    parts: list[Tensor] = []
    part_logsumexps: list[Tensor] = []
    for layers, members in shared.prompts:
        part, part_logsumexp = attention_with_logsumexp(
            queries[:, members].flatten(1, 2)[None], *layers[layer], False, scale
        )
        parts.append(part)
        part_logsumexps.append(part_logsumexp)
    heads, of_each = query.shape[1:3]
    over_prompt = torch.cat(parts, 2).view(heads, -1, of_each, query.shape[3]).transpose(0, 1)
    over_prompt_logsumexp = torch.cat(part_logsumexps, 2).view(heads, -1, of_each).transpose(0, 1)
    weight = torch.sigmoid(over_prompt_logsumexp - logsumexp[shared.rows])[..., None]
    merged = torch.lerp(output[shared.rows].to(weight.dtype), over_prompt.to(weight.dtype), weight)
    return output.index_copy_(0, shared.rows, merged.to(output.dtype))


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, R, d] and log-sum-exp [B, H, R] of attention under an additive mask."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
    return plain_masked_attention(query, key, value, mask, scale)


def plain_masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """As the fused kernel, where there is none that gives log-sum-exps under a mask."""
    scores = (query @ key.mT).to(softmax_dtype(query.dtype)) * scale + mask
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp()
    return weights.to(value.dtype) @ value, logsumexp


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_prompts: SharedPrompts | _Probe | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every layer; ``shared_prompts`` is the model's keyword."""
    if not isinstance(shared_prompts, SharedPrompts):
        if isinstance(shared_prompts, _Probe):
            is_plain = all(others[k] is None for k in others.keys() - _HARMLESS)
            shared_prompts.num_plain += is_plain and key.shape[-1] == value.shape[-1]
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    assert attention_mask is not None and isinstance(module.layer_idx, int)
    num_rows, num_heads, _, head_size = query.shape
    output = decode_attention(
        query.view(num_rows, key.shape[1], -1, head_size),
        key,
        value,
        attention_mask,
        shared_prompts,
        module.layer_idx,
        head_size**-0.5 if scaling is None else scaling,
    )
    return output.reshape(num_rows, 1, num_heads, head_size), None


AttentionInterface.register(NAME, _interface)
AttentionMaskInterface.register(NAME, sdpa_mask)


def takes_shared_prompts(model: PreTrainedModel) -> bool:
    """Whether every layer of the model attends through ``decode_attention`` from now on.

    Not if its attention is written in another way or is not plain (biases, sinks, values of another
    size): then it stays as it is. Runs one token through the model.
    """
    before = model.config._attn_implementation
    probe = _Probe()
    model.set_attn_implementation(NAME)
    try:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model.base_model(input_ids=token, use_cache=False, shared_prompts=probe)
    except TypeError:  # the keyword is not known
        probe.num_plain = 0
    if probe.num_plain == model.config.get_text_config().num_hidden_layers:
        return True
    model.set_attn_implementation(before)
    return False
