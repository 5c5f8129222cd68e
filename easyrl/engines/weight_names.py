"""Weights as ``save_pretrained`` names and shapes them, a module at a time.

``named_parameters`` is not that: transformers 5 fuses the experts of a MoE layer on loading, a tied
head appears in the module but not in the file, and an adapter lies beside the weight it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from easyrl.engines.host_copies import HostCopy, one_ahead
from easyrl.models.lora import adapter_layers, factors, merged_weight


def saved_weights(
    model: PreTrainedModel, *, is_writer: bool, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight once, on the CPU; the same names and order on all ranks.

    What adapters add is ``merged``, or left out: either way the weights are a plain model's.

    A ZeRO-3 model is gathered module by module, which is collective: all ranks iterate. Ranks that
    are not the writer get tensors of the right shape without data (device ``meta``).
    """
    for values in one_ahead(_copied_modules(model, is_writer, merged)):
        yield from revert_weight_conversion(model, values).items()
        del values  # page-locked memory for the module after the next


def saved_shapes(model: PreTrainedModel) -> dict[str, Tensor]:
    """What ``saved_weights`` yields of a model on the device ``meta``, by name; not collective."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers())
    names = _saved_names(model, tensors)
    return dict(revert_weight_conversion(model, {name: tensors[name] for name in names}))


def adapter_weights(model: PreTrainedModel, *, is_writer: bool) -> Iterator[tuple[str, Tensor]]:
    """As ``saved_weights``, of the trained adapter alone, as peft names what it saves."""
    for values in one_ahead(_copied_adapters(model, is_writer)):
        yield from values.items()


def _copied_modules(model: PreTrainedModel, is_writer: bool, merged: bool) -> Iterator[HostCopy]:
    """Conversions split or join the weights of one module, so that is the unit."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers())
    names = _saved_names(model, tensors)
    layers = adapter_layers(model)
    for owner, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        module = {name: tensors[name] for name in group}
        layer = layers.get(owner.removesuffix(".base_layer"))
        beside = factors(layer) if merged and layer is not None else ()
        with GatheredParameters([*module.values(), *beside]):
            if layer is not None:
                weight = f"{owner}.weight"
                if is_writer and merged:
                    module[weight] = merged_weight(layer, module[weight])
                module = {name.replace(".base_layer.", "."): t for name, t in module.items()}
            copy = _host_copy(module, is_writer)
        yield copy


def _copied_adapters(model: PreTrainedModel, is_writer: bool) -> Iterator[HostCopy]:
    for owner, layer in adapter_layers(model).items():
        a, b = factors(layer)
        prefix = f"base_model.model.{owner}"
        module = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        with GatheredParameters([a, b]):
            copy = _host_copy(module, is_writer)
        yield copy


def _host_copy(module: Mapping[str, Tensor], is_writer: bool) -> HostCopy:
    """Because what is gathered is gone afterwards; no data where nobody reads it."""
    if is_writer:
        return HostCopy(module, kept=not any(is_zero_param(tensor) for tensor in module.values()))
    return HostCopy({n: torch.empty_like(t, device="meta") for n, t in module.items()})


def _saved_names(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[str]:
    """What belongs in a file: no buffer that is computed, no weight that is tied to another."""
    tied = {
        target
        for target, source in model.all_tied_weights_keys.items()
        if tensors[target] is tensors[source]
    }
    beside = tuple(
        f"{owner}.{name}." for owner in adapter_layers(model) for name in ("lora_A", "lora_B")
    )
    return [n for n in model.state_dict() if n not in tied and not n.startswith(beside)]
