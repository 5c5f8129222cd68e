"""Whether a vLLM worker would take a checkpoint's tensors: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from .chunk_format import DTYPE_NAMES, DTYPES
from .proof import ObservedLoading, ServedWeight, stand_ins


@torch.no_grad()
def shape_problems(
    model: Any,  # a module of vLLM's, with load_weights
    vllm_config: VllmConfig,
    tensors: Mapping[str, Sequence[Any]],
) -> dict[str, str]:
    """By name, why ``model`` would not load a tensor of ``tensors`` (name -> dtype, shape).

    And what it serves that none of them fills. As in ``prove``, its own ``load_weights`` runs on
    stand-ins without data, which changes nothing; nothing is read either.
    """
    problems: dict[str, str] = {}
    parts = disable_mtp_completeness_check()  # a tensor at a time
    with set_current_vllm_config(vllm_config), parts, stand_ins(model) as served:
        loading = TriedLoading(served)
        for name, (dtype, shape) in tensors.items():
            source = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            loading.begin(source)
            try:
                with loading:
                    model.load_weights([(name, source)])
            except Exception as error:  # whatever a model's loader says of a stranger's tensor
                said = " ".join(str(error).split())
                problems[name] = f"cannot be loaded ({type(error).__name__}: {said:.200})"
                continue
            alone = vllm_config.parallel_config.world_size == 1
            if loading.problem is not None:
                problems[name] = loading.problem
            elif not loading.is_used and source.numel() and alone:
                problems[name] = "the served model has no use for it"
        if not problems:  # what could not be loaded leaves gaps
            problems |= {weight.name: gap for weight in served if (gap := weight.gap())}
    return problems


class TriedLoading(ObservedLoading):
    """Sees that a tensor is written to a stand-in, and of which dtype what is served there is."""

    def __init__(self, served: Sequence[ServedWeight]) -> None:
        super().__init__(served, b"")

    def begin(self, source: Tensor) -> None:
        super().begin(source)
        self.is_used = False

    def _observe(self, weight: ServedWeight | None, target: Tensor, source: Tensor) -> None:
        assert weight is not None, "one tensor is written by these"
        weight.num_loaded += target.numel()
        self.is_used = True
        wanted, dtype = self._source.dtype, weight.stand_in.dtype
        if source.is_meta and wanted != dtype:
            self._report(f"is {DTYPE_NAMES[wanted]}, the served model's {DTYPE_NAMES.get(dtype)}")
