"""A frozen teacher beside the policy: a model of its own architecture on the policy's packed rows.

What a loss needs of it is either its log-probabilities of the sampled tokens, which any
``FrozenModel`` gives, or its distributions over the whole vocabulary (``FullTeacher``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.logprobs.linear_divergence import TeacherRows
from easyrl.models.output_head import LogitShape
from easyrl.models.policy_model import run_micro_batch
from easyrl.schema import MicroBatch


@dataclass
class FullTeacher:
    """A teacher whose distributions are compared with the policy's over the whole vocabulary.

    ``module`` is a ``PolicyModel`` whose head is ``NoProjection``, or an engine around one. The
    projection is apart and whole on every rank: the policy's head needs it in its own forward and
    backward, when a sharded teacher's parameters are not gathered.
    """

    module: nn.Module
    weight: Tensor  # [V, H_T], on the device
    bias: Tensor | None  # [V]
    logits: LogitShape  # what its model makes of the product

    @torch.no_grad()
    def rows(self, row: MicroBatch, layout: SegmentLayout) -> TeacherRows:
        """At the N predictors of ``row``, both on the device."""
        (hidden,) = run_micro_batch(self.module, row, 1.0, layout=layout)
        return self.logits.teacher_rows(hidden, self.weight, self.bias)
