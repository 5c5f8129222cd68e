"""A split model's weights as ``save_pretrained`` names them, put together a parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from easyrl.engines.megatron.layout import Layout
from easyrl.engines.megatron.weights.mapping import Rule
from easyrl.engines.megatron.weights.pieces import Piece, Shape, TensorRank, pieces

WRITER = 0  # the rank that gets the values


@dataclass(frozen=True)
class WholeModel:
    """What all ranks know of the model that they share.

    Attributes:
        rules: by parameter, in the model's order.
        shapes: of Hugging Face's tensors.
        stages: the pipeline stage of each parameter.
    """

    rules: Mapping[str, Rule]
    shapes: Mapping[str, Shape]
    stages: Mapping[str, int]
    layout: Layout
    num_kv_heads: int

    def parameters(self) -> list[str]:
        """By name, each tensor once: a tied projection is the embedding."""
        first = {rule.tensors[0]: name for name, rule in reversed([*self.rules.items()])}
        return [name for name, rule in self.rules.items() if first[rule.tensors[0]] == name]

    def pieces(self, rule: Rule, tensor_rank: int) -> list[Piece]:
        place = TensorRank(tensor_rank, self.layout.tensor)
        return pieces(rule, self.shapes, place, self.num_kv_heads)


def gathered_weights(
    model: WholeModel, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each Hugging Face tensor once, on the CPU; the same names and order on all ranks. Collective.

    ``parameters`` are this rank's, named as the whole model's. Each part is sent by the first
    data-parallel rank that has it. Ranks other than the writer get tensors without data (device
    ``meta``).
    """
    return _gathered(model, parameters, model.parameters(), WRITER)


def stage_weights(
    model: WholeModel, parameters: Mapping[str, Tensor], stage: int
) -> Iterator[tuple[str, Tensor]]:
    """As ``gathered_weights``, of one pipeline stage, on the rank that ``Layout.writer`` says.

    Collective over the stage's ranks. A tied embedding is the first stage's.
    """
    own = [name for name in model.parameters() if model.stages[name] == stage]
    return _gathered(model, parameters, own, model.layout.writer(stage))


@torch.no_grad()
def _gathered(
    model: WholeModel, parameters: Mapping[str, Tensor], names: Sequence[str], writer: int
) -> Iterator[tuple[str, Tensor]]:
    rank, layout = dist.get_rank(), model.layout
    for name in names:
        rule = model.rules[name]
        parts = {
            layout.rank(tensor, 0, model.stages[name]): model.pieces(rule, tensor)
            for tensor in range(layout.tensor)
        }
        own = parameters.get(name)
        held = None
        if own is not None:  # all ranks that share it by ZeRO-3
            with GatheredParameters([own]):
                held = _joined(own, model.pieces(rule, layout.place(rank).tensor))
        if rank != writer:
            if rank in parts:
                assert held is not None
                dist.send(held, writer)
            for tensor in rule.tensors:
                yield tensor, torch.empty(tuple(model.shapes[tensor]), device="meta")
            continue
        like = own if own is not None else next(iter(parameters.values()))
        whole = {t: torch.empty(tuple(model.shapes[t]), dtype=like.dtype) for t in rule.tensors}
        for owner, part in parts.items():
            if owner == rank:
                assert held is not None
                received = held
            else:
                size = sum(_numel(piece, model.shapes) for piece in part)
                received = torch.empty(size, dtype=like.dtype, device=like.device)
                dist.recv(received, owner)
            _spread(received.cpu(), part, whole)
        yield from whole.items()


def _joined(parameter: Tensor, held: Sequence[Piece]) -> Tensor:
    return torch.cat([piece.of_parameter(parameter).reshape(-1) for piece in held])


def _spread(joined: Tensor, held: Sequence[Piece], whole: Mapping[str, Tensor]) -> None:
    """Inverse of ``_joined``, into the whole tensors. A tensor that all ranks have comes from each,
    the same."""
    at = 0
    for piece in held:
        target = piece.of_tensor(whole[piece.tensor])
        target.copy_(joined[at : at + target.numel()].view(target.shape))
        at += target.numel()


def _numel(piece: Piece, shapes: Mapping[str, Shape]) -> int:
    shape = list(shapes[piece.tensor])
    shape[piece.dim] = piece.size
    return math.prod(shape)
