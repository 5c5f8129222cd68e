"""Our side: the packed row, through the model and the loss that an engine trains with."""

from __future__ import annotations

from torch import Tensor

from benchmarks.parts.shared_prompt.sizes import RECIPE
from benchmarks.parts.shared_prompt.workload import Forward, Workload
from easyrl.models.tri_model import TriModel


def ours(work: Workload) -> Forward:
    """``TriModel.loss`` of the micro-batch, its metrics included."""
    tri_model = TriModel(
        work.policy, reference=None, old_policy=None, temperature=1.0, device=work.device
    )

    def forward() -> Tensor:
        loss_sum, _ = tri_model.loss(work.batch.micro_batch, RECIPE, same_pass=work.same_pass)
        return loss_sum / work.batch.denominator

    return forward
