"""The projection's log-probabilities when its vocabulary is split over processes.

Tensor parallelism gives each process some consecutive rows of the weight (Shoeybi et al.,
"Megatron-LM", 2019, section 3). No process sees another's logits: per chunk, the processes
exchange four numbers per position and, backward, the gradient of the hidden states.

Shape legend: N positions, H hidden size, C chunk, V_p rows of the weight in this process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from easyrl.kernels.logprobs.vocab_softmax import RowSums


@dataclass(frozen=True)
class VocabShard:
    """Labels ``start`` up to ``start + size`` live in this process; the group holds all of them.

    Rows that pad a vocabulary to a round size are no tokens: pass the weight without them, as
    ``weight[:size]``. Parts may differ in size, none may be empty.

    ``reduce_hidden``: whether the function sums the gradient of the hidden states over the group.
    Each process has the part that went through its own rows; with True the result is the whole
    gradient, the same in all processes. Choose False where something before the projection does
    the sum, as Megatron's ``copy_to_tensor_model_parallel_region`` does in its backward, or
    ``gather_from_sequence_parallel_region`` by a reduce-scatter: doing both counts it double.
    """

    group: dist.ProcessGroup
    start: int
    size: int
    reduce_hidden: bool = True

    def local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into this part, int64 [C], and whether it holds the label, bool [C]."""
        local = labels - self.start
        held = (local >= 0) & (local < self.size)
        return local.clamp(0, self.size - 1), held

    def combine(self, sums: RowSums, held: Tensor) -> RowSums:
        """Over the whole vocabulary, from those over this part: two all-reduces of a chunk's
        positions. A label that no process holds becomes NaN."""
        maximum = sums.maximum.clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        lower = sums.maximum - maximum  # <= 0
        scale = lower.exp()
        zero = maximum.new_zeros(())
        added = torch.stack(
            [
                sums.exp_sum * scale,
                (sums.weighted_sum + sums.exp_sum * lower) * scale,
                sums.label_logit.where(held, zero),
                held.to(maximum.dtype),
            ]
        )
        dist.all_reduce(added, group=self.group)
        exp_sum, weighted_sum, label_logit, holders = added.unbind()
        label_logit = label_logit.where(holders == 1, label_logit.new_full((), torch.nan))
        return RowSums(maximum, exp_sum, weighted_sum, label_logit)

    def sum_hidden_gradient_(self, grad_hidden: Tensor) -> None:
        """Over the parts, in place, unless the caller does that."""
        if self.reduce_hidden:
            dist.all_reduce(grad_hidden, group=self.group)
