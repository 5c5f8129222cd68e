"""Weights as ``save_pretrained`` names and shapes them, a module at a time.

``named_parameters`` is not that: transformers 5 fuses the experts of a MoE layer on loading, and a
tied head appears in the module but not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def saved_weights(model: PreTrainedModel, *, is_writer: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight once, on the CPU; the same names and order on all ranks.

    A ZeRO-3 model is gathered module by module, which is collective: all ranks iterate. Ranks that
    are not the writer get tensors of the right shape without data (device ``meta``).
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers())
    names = _saved_names(model, tensors)
    # Conversions split or join the weights of one module, so that is the unit.
    for _, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        module = {name: tensors[name] for name in group}
        with GatheredParameters(list(module.values())):
            # copied: what is gathered is gone after the block
            values = {
                name: tensor.detach().to("cpu", copy=True)
                if is_writer
                else torch.empty_like(tensor, device="meta")
                for name, tensor in module.items()
            }
        yield from revert_weight_conversion(model, values).items()


def _saved_names(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[str]:
    """What belongs in a file: no buffer that is computed, no weight that is tied to another."""
    tied = {
        target
        for target, source in model.all_tied_weights_keys.items()
        if tensors[target] is tensors[source]
    }
    return [name for name in model.state_dict() if name not in tied]
