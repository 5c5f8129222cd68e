"""PyPI's ``prefix-grouper``, used as its README says.

Its inputs are put together by ``concat_input``, its outputs taken apart by ``split_output`` with
``include_prefix_last=1``, its attention is ``PrefixGrouper.forward`` with fused attention as the
function inside. The two-dimensional padding masks that it hands to that function are for
flash-attn; the function below makes of them what fused attention takes at its best: the prompt
causal without a mask, the responses over prompt and themselves with a mask of ``[R, P + R]`` that
all of them share, made once (on CUDA the lower-right causal bias, which flash kernels run without
a mask). Preparing the batch is outside the clock, as packing is on our side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import AttentionInterface

from benchmarks.parts.shared_prompt.workload import Forward, Workload

ATTENTION = "benchmark_prefix_grouper"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prefix_grouper: object = None,
    suffix_mask: Tensor | CausalBias | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    def fused(q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor) -> Tensor:
        is_prefix = q.shape[2] == k.shape[2]
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if is_prefix else suffix_mask,
            is_causal=is_prefix,
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2)

    return prefix_grouper.forward(fused, query, key, value), None


AttentionInterface.register(ATTENTION, _attention)


def prefix_grouper(work: Workload) -> Forward:
    from prefix_grouper import PrefixGrouper

    batch = work.batch
    prompt_ids = batch.prompt_ids[None]
    completion_ids = pad_sequence(list(batch.responses), batch_first=True)
    completion_mask = pad_sequence(
        [torch.ones(len(r), dtype=torch.bool) for r in batch.responses], batch_first=True
    )
    grouper = PrefixGrouper.from_ungrouped_masks(
        prefix_mask=torch.ones_like(prompt_ids, dtype=torch.bool).to(work.device),
        suffix_mask=completion_mask.to(work.device),
        group_sizes=len(batch.responses),
        padding_mode="right",
        device=work.device,
    )
    input_ids = grouper.concat_input(
        prompt_ids.to(work.device),
        grouper.ungrouped_prefix_mask,
        completion_ids.to(work.device),
        completion_mask.to(work.device),
    )
    position_ids = batch.micro_batch.position_ids[None].to(work.device)
    queries, prompt = completion_ids.shape[1], prompt_ids.shape[1]
    suffix_mask: Tensor | CausalBias = causal_lower_right(queries, prompt + queries)
    if work.device.type != "cuda":
        suffix_mask = torch.ones(queries, prompt + queries, dtype=torch.bool).tril(prompt)

    def forward() -> Tensor:
        hidden = work.hidden_states(
            ATTENTION,
            input_ids=input_ids,
            position_ids=position_ids,
            prefix_grouper=grouper,
            suffix_mask=suffix_mask,
        )
        _, _, suffix, mask = grouper.split_output(hidden, include_prefix_last=1)
        return work.chunked_loss(suffix[:, :-1][mask[:, 1:]])

    return forward
