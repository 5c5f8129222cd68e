"""G separate sequences, padded at the right to the longest: what most trainers do.

Attention is transformers' ``sdpa`` without a mask, its fastest form: behind a causal mask nothing
real sees the padding at the right.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.parts.shared_prompt.workload import Forward, Workload


def padded(work: Workload) -> Forward:
    batch = work.batch
    sequences = [torch.cat([batch.prompt_ids, response]) for response in batch.responses]
    input_ids = pad_sequence(sequences, batch_first=True).to(work.device)
    width = input_ids.shape[1]
    predictors = batch.predictor_index([g * width for g in range(len(sequences))]).to(work.device)

    def forward() -> Tensor:
        hidden = work.hidden_states("sdpa", input_ids=input_ids)
        return work.chunked_loss(hidden.flatten(0, 1).index_select(0, predictors))

    return forward
