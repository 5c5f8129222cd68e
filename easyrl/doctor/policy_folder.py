"""The weights in ``model.path``, tensor by tensor, without loading the model."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from easyrl.config import ModelConfig
from easyrl.inference_client.client import TensorShapes
from easyrl.inference_client.vllm_plugin.easyrl_vllm.chunk_format import DTYPES
from easyrl.models.weight_files import weight_files

MOST_NUMBERS = 2**24  # of all tensors that are read together
LARGEST = 2**20  # of one


class PolicyFolder:
    """Reads tensors in the dtype in which the run sends them (``challenge.TensorReader``)."""

    def __init__(self, model: ModelConfig, shapes: TensorShapes) -> None:
        self._shapes = shapes
        self._files: dict[str, Path] = {}
        for path in weight_files(model.path):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def some(self) -> TensorShapes:
        """Small tensors that the run sends under the name that they have in the files."""
        found, left = {}, MOST_NUMBERS
        for name, (dtype, shape) in self._shapes.items():
            size = prod(shape)
            if name in self._files and size <= min(LARGEST, left):
                found[name] = dtype, shape
                left -= size
        return found

    def read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        dtype: torch.dtype = DTYPES[self._shapes[name][0]]
        return tensor.to(dtype)

    def verify(self, name: str) -> None:
        """A folder is what it is."""
