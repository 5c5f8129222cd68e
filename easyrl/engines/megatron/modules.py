"""What is ours in a megatron-core model: normalisation, attention over packed rows, rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout


@dataclass(frozen=True)
class Row:
    """What all layers of a stage need of a packed row of T tokens.

    It goes through megatron-core as the attention mask, which it passes on unread.
    """

    layout: SegmentLayout
    cos: Tensor  # [1, T, head size], of the rotation at each token's position
    sin: Tensor


class RMSNorm(nn.Module):
    """Root mean square normalisation as Hugging Face's models compute it.

    Its weight is the same on all ranks of a tensor-parallel group. Where these see different tokens
    (``sequence_parallel``) or different heads (``of_heads``) the weight's gradient is their sum,
    which is formed in the backward pass.
    """

    of_heads = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self._eps = eps
        self._is_summed = config.tensor_model_parallel_size > 1 and (
            config.sequence_parallel or self.of_heads
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] of [..., H]; the mean is taken in float32."""
        weight: Tensor = self.weight
        if self._is_summed:
            weight = copy_to_tensor_model_parallel_region(weight)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return weight * wide.to(hidden.dtype)


class HeadRMSNorm(RMSNorm):
    """Of query or key heads, which tensor-parallel ranks share."""

    of_heads = True


class OutputProjection(RowParallelLinear):  # type: ignore[misc]
    """megatron-core's, which sums the tensor ranks' products; here a copy of its own product.

    It sums in place: a product that selective checkpointing has kept would be summed again.
    """

    def _forward_impl(self, *arguments: Any, **settings: Any) -> Tensor:
        product: Tensor = super()._forward_impl(*arguments, **settings)
        is_summed_in_place = self.tp_group.size() > 1 and not self.sequence_parallel
        return product.clone() if is_summed_in_place else product


class SharedPromptAttention(nn.Module):
    """The core attention of a layer: rotation, then attention as the row's segments allow."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        # one for all layers and models of a process, set where the model is built
        self.attention: CheckedAttention | None = None
        self._scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Row, **_: Any
    ) -> Tensor:
        """[T, 1, heads · size] of ``query``, ``key`` and ``value`` [T, 1, heads, size]."""
        assert self.attention is not None
        row = attention_mask
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # [1, heads, T, d]
        q, k = apply_rotary_pos_emb(q, k, row.cos, row.sin)
        output = self.attention(q, k, v, row.layout, self._scale)
        num_tokens = query.shape[0]
        return output.permute(2, 0, 1, 3).reshape(num_tokens, 1, -1)
