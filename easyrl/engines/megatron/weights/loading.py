"""A rank's parameters from a checkpoint's safetensors files: only its own rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.engines.megatron.weights.mapping import Rule, Split
from easyrl.engines.megatron.weights.pieces import Piece, Shape, TensorRank, pieces
from easyrl.models.weight_files import REMEDY, weight_files


@torch.no_grad()
def load_parameters(
    parameters: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    folder: Path,
    place: TensorRank,
    num_kv_heads: int,
) -> None:
    """Fills ``parameters``, named as the whole model's are; rows that pad a vocabulary become 0.

    The files are memory-mapped. Raises ``ConfigError`` naming ``model.path`` if a tensor is missing
    or of another shape than the model's.
    """
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for path in weight_files(folder):
            file = opened.enter_context(safe_open(path, framework="pt"))
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, parameter in parameters.items():
            rule = rules[name]
            if missing := [tensor for tensor in rule.tensors if tensor not in tensors]:
                raise ConfigError(f"model.path: {folder} has no {missing[0]}; {REMEDY}")
            shapes = {tensor: tensors[tensor].get_shape() for tensor in rule.tensors}
            parameter.zero_()
            own = pieces(rule, shapes, place, num_kv_heads)
            for piece in own:
                _read(piece, tensors[piece.tensor], parameter, folder)
            filled = sum(piece.size for piece in own)
            if rule.split is not Split.ROWS and own and filled != parameter.shape[own[0].dim]:
                raise ConfigError(_other_shape(own[0].tensor, shapes, folder))


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Of the tensors in a checkpoint's files."""
    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def _read(piece: Piece, stored: Any, parameter: Tensor, folder: Path) -> None:
    end = piece.start + piece.size
    part = stored[piece.start : end] if piece.dim == 0 else stored[:, piece.start : end]
    shape = list(parameter.shape)
    shape[piece.dim] = piece.size
    if list(part.shape) != shape or piece.at + piece.size > parameter.shape[piece.dim]:
        raise ConfigError(_other_shape(piece.tensor, {piece.tensor: stored.get_shape()}, folder))
    piece.of_parameter(parameter).copy_(part)


def _other_shape(tensor: str, shapes: Mapping[str, Shape], folder: Path) -> str:
    return (
        f"model.path: {folder} has weights of other shapes than its config.json says: {tensor} is "
        f"{list(shapes[tensor])}; give the config.json that belongs to the weights"
    )
