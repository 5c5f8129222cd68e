"""Attention of a decode step that reads a shared prompt once for all of its samples.

Attention over a prompt's keys and over a sequence's own is computed apart and merged by the two
log-sum-exps (as in training, ``kernels/attention/merged_attention.py``). The queries of all samples
of a prompt make one matrix product per key-value head with its keys; no key or value is copied, for
none of the samples and for none of the query heads that share a key-value head.

Models call it through transformers' ``AttentionInterface``, ``decode_forward.py`` by itself.

Shape legend: B sequences, M of them with a prompt held apart, H key-value heads, R query heads of
each, d head size, P positions of a prompt, L of the sequences' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from easyrl.inference_client.servers.embedded.cache import StatesOfLayers
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
    def of(cls, of_rows: list[StatesOfLayers | None], device: torch.device) -> SharedPrompts:
        """Of the step's sequences, by row; None: nothing is held apart for it."""
        members: dict[int, list[int]] = {}
        for row, layers in enumerate(of_rows):
            if layers is not None:
                members.setdefault(id(layers), []).append(row)
        prompts: list[tuple[StatesOfLayers, slice]] = []
        rows: list[int] = []
        for of_one in members.values():
            layers = of_rows[of_one[0]]
            assert layers is not None
            prompts.append((layers, slice(len(rows), len(rows) + len(of_one))))
            rows += of_one
        return cls(prompts, torch.tensor(rows, dtype=torch.int64, device=device))


@dataclass(slots=True, eq=False)
class ProbedStep:
    """In place of ``SharedPrompts``: also checks what a model's layers hand over.

    Raises ``ValueError`` at the first layer whose attention is not plain.
    """

    shared: SharedPrompts
    max_model_len: int  # tokens of the longest sequence: a window of as many leaves nothing out
    num_layers: int = 0  # that came by

    def check(
        self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor, others: dict[str, Any]
    ) -> None:
        given = [
            name
            for name, setting in others.items()
            if name not in _HARMLESS and setting is not None and setting is not False
        ]
        if (others.get("sliding_window") or 0) >= self.max_model_len:
            given.remove("sliding_window")
        if given:  # position biases, sinks
            raise ValueError(f"attention with {', '.join(given)}")
        assert isinstance(module.layer_idx, int)
        prompt_keys, prompt_values = self.shared.prompts[0][0][module.layer_idx]
        for of_step, held in ((key, prompt_keys), (value, prompt_values)):
            if (of_step.shape[1], of_step.shape[3]) != (held.shape[1], held.shape[3]):
                raise ValueError("attention over other keys and values than the cached ones")
        if key.shape[3] != value.shape[3]:
            raise ValueError("values of another size than keys")
        if mask.shape != (len(key), 1, 1, key.shape[2]):
            raise ValueError("attention under a mask of its own")
        self.num_layers += 1


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
    if not shared.prompts:
        return _attention(query, key, value, mask, scale)
    output, logsumexp = _masked_attention(query, key, value, mask, scale)
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


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Output [B, H, R, d] of attention under an additive mask."""
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return _masked_attention(query, key, value, mask, scale)[0]
    # a head of a sequence has few scores: products of all at once cost less than the fused kernel
    rows, heads, of_each, _ = query.shape
    bias = mask[:, 0].expand(rows, heads, -1).reshape(rows * heads, 1, -1)
    queries, keys, values = (states.flatten(0, 1) for states in (query, key, value))
    scores = torch.baddbmm(bias, queries, keys.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), values).view(rows, heads, of_each, -1)


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
    shared_prompts: SharedPrompts | ProbedStep | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every layer; ``shared_prompts`` is the model's keyword."""
    if isinstance(shared_prompts, ProbedStep):
        assert attention_mask is not None
        shared_prompts.check(module, key, value, attention_mask, others)
        shared_prompts = shared_prompts.shared
    # on a CPU what is below computes the same as the library, without its detours
    is_as_usual = shared_prompts is not None and not shared_prompts.prompts
    if shared_prompts is None or (is_as_usual and query.device.type != "cpu"):
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
