"""Muon on hidden matrices and AdamW on all else, as one optimizer that ZeRO 0, 1 and 2 can drive.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) orthogonalises the momentum of each
matrix; the update has AdamW's size (0.2 √max(rows, columns); Liu et al. 2025, Muon is Scalable for
LLM Training, arXiv 2502.16982), so that learning rate and weight decay are AdamW's too.

Division and clip come before it. In DeepSpeed's own Muon (0.19.8, but for bf16 with ZeRO-1)
gradients join the momentum before they are divided, and the update is what is measured and clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from easyrl.engines.deepspeed.shards import Fragment, Shard

MOMENTUM = "momentum_buffer"
IS_MUON = "is_muon"  # key of a parameter group


@dataclass(frozen=True, slots=True)
class PartitionedMatrix:
    """A matrix of a flat partition."""

    shape: torch.Size
    here: Fragment  # what this rank has of it; may be empty
    is_split: bool  # no rank has all of it


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps parameter groups with ``is_muon`` by ``torch.optim.Muon``, the others by AdamW.

    The momentum is kept where the weights are: whole with ZeRO-0, in a rank's flat partition with
    ZeRO 1 and 2. There a matrix that lies on several ranks is put together in each step (the
    distributed Muon of arXiv 2502.16982).

    Args:
        groups: parameter groups with ``lr``, ``weight_decay`` and ``is_muon``; of matrices where
            that is true.
        momentum: of Nesterov's momentum, an exponential moving average as torch has it.
        adamw: of ``torch.optim.AdamW``.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, momentum: float, adamw: Mapping[str, Any]
    ) -> None:
        super().__init__(groups, {})
        self.momentum = momentum
        self.adamw: torch.optim.AdamW | None = None  # adapters are matrices only
        if others := [group for group in self.param_groups if not group[IS_MUON]]:
            self.adamw = torch.optim.AdamW(others, **adamw)
            self.adamw.state = self.state
        # DeepSpeed replaces a group's parameters by its partition
        self._matrices = [list(g["params"]) for g in self.param_groups if g[IS_MUON]]
        self._layouts: dict[Tensor, list[PartitionedMatrix]] = {}

    def is_muon(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, of a parameter group, is stepped by Muon."""
        return any(
            group[IS_MUON] and any(tensor is each for each in group["params"])
            for group in self.param_groups
        )

    def take_partitions(
        self, shards: Sequence[Shard], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Learns what the flat partitions of ZeRO 1 and 2 are made of. Collective."""
        names = {parameter: name for name, parameter in parameters.items()}
        held = {fragment.name: fragment for shard in shards for fragment in shard.fragments}
        groups = [group for group in self.param_groups if group[IS_MUON]]
        for group, matrices in zip(groups, self._matrices, strict=True):
            (partition,) = group["params"]
            parts = [held.get(names[m], Fragment(names[m], 0, 0, 0)) for m in matrices]
            sizes = [matrix.numel() for matrix in matrices]
            most = torch.tensor([part.numel for part in parts], device=partition.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            self._layouts[partition] = [
                PartitionedMatrix(matrix.shape, part, is_split=largest < size)
                for matrix, part, largest, size in zip(
                    matrices, parts, most.tolist(), sizes, strict=True
                )
            ]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Of the groups that ``param_groups`` has at the time: DeepSpeed steps them in turn."""
        for group in self.param_groups:
            for tensor in group["params"] if group[IS_MUON] else ():
                self._step(tensor, group)
        if others := [group for group in self.param_groups if not group[IS_MUON]]:
            assert self.adamw is not None
            self.adamw.param_groups = others
            self.adamw.step()

    def _step(self, tensor: Tensor, group: Mapping[str, Any]) -> None:
        gradient = tensor.grad
        if gradient is None:
            return
        state = self.state[tensor]
        if not state:
            state |= fresh_muon_state(tensor)
        state["step"] += 1
        averaged = state[MOMENTUM].lerp_(gradient, 1 - self.momentum)
        if tensor.ndim == 2:
            _orthogonalised_step(tensor, gradient.lerp(averaged, self.momentum), group)
            return
        for matrix in self._layouts[tensor]:
            start, end = matrix.here.offset, matrix.here.offset + matrix.here.numel
            weight = tensor.detach()[start:end]
            update = gradient[start:end].lerp(averaged[start:end], self.momentum)
            if matrix.is_split:
                _split_step(matrix, weight, update, group)
            elif matrix.here.numel > 0:
                _orthogonalised_step(weight.view(matrix.shape), update.view(matrix.shape), group)


def fresh_muon_state(tensor: Tensor) -> dict[str, Tensor]:
    """Before the first step of ``tensor``."""
    return {"step": torch.zeros((), dtype=torch.float32), MOMENTUM: torch.zeros_like(tensor)}


def _orthogonalised_step(weight: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
    """torch's Muon on one matrix, without a momentum of its own; ``weight`` is changed in place."""
    matrix = nn.Parameter(weight.detach())
    matrix.grad = update
    torch.optim.Muon(
        [matrix],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()


def _split_step(
    matrix: PartitionedMatrix, weight: Tensor, update: Tensor, group: Mapping[str, Any]
) -> None:
    """Of a matrix on several ranks: ``weight`` is changed in place. Collective."""
    inside = slice(matrix.here.start, matrix.here.start + matrix.here.numel)
    whole_update = update.new_zeros(matrix.shape.numel())
    whole_update[inside] = update
    dist.all_reduce(whole_update)  # an element is not 0 on one rank only: the sum is exact
    if matrix.here.numel == 0:
        return
    whole_weight = torch.zeros_like(whole_update)  # others' elements are theirs to step
    whole_weight[inside] = weight
    _orthogonalised_step(whole_weight.view(matrix.shape), whole_update.view(matrix.shape), group)
    weight.copy_(whole_weight[inside])
