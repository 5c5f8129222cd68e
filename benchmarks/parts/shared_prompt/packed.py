"""G separate sequences in one row without padding, the prompt in each of them.

Each sequence has its own causal fused attention: no mask, no block of it computed and thrown away.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

from benchmarks.parts.shared_prompt.workload import Forward, Workload

ATTENTION = "benchmark_packed"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sequence_lengths: list[int] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    # split, not slices: its backward is one concatenation
    assert sequence_lengths is not None and attention_mask is None
    parts = zip(*(x.split(sequence_lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in parts
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


AttentionInterface.register(ATTENTION, _attention)


def packed(work: Workload) -> Forward:
    batch, lengths = work.batch, work.batch.lengths
    tokens = [part for response in batch.responses for part in (batch.prompt_ids, response)]
    input_ids = torch.cat(tokens).to(work.device)[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths]).to(work.device)[None]
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    predictors = batch.predictor_index(starts).to(work.device)

    def forward() -> Tensor:
        hidden = work.hidden_states(
            ATTENTION,
            input_ids=input_ids,
            position_ids=position_ids,
            sequence_lengths=lengths,
        )
        return work.chunked_loss(hidden[0].index_select(0, predictors))

    return forward
