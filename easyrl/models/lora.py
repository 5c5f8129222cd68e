"""Low-rank adapters (Hu et al. 2021, "LoRA") on a model's linear layers, through peft.

A layer computes ``W x + alpha / rank · B A x``; ``W`` is frozen, ``A`` and ``B`` are trained. The
model keeps its class and its structure: each adapted layer becomes peft's, around the old one.

peft is imported where it is needed: that takes seconds, and few runs have adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from easyrl.config import ConfigError, LoraConfig
from easyrl.models.policy_model import PolicyModel
from easyrl.models.tri_model import FrozenModel

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel


TRAINED = "default"  # peft's own name of a single adapter
OLD_POLICY = "old_policy"
_LINEAR = (nn.Linear, Conv1D)  # GPT-2's matrices are of the latter
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def add_adapter(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freezes ``model`` and puts a trained adapter on its target layers, in the model's dtype.

    ``A`` is uniform as in peft and drawn from ``seed`` alone, ``B`` is zero: the model computes
    what it did before. Raises ``ConfigError`` naming ``model.lora.target_modules`` if one of them
    is no linear layer.
    """
    from peft import inject_adapter_in_model

    _check_targets(model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # new layers are made on the CPU
        inject_adapter_in_model(peft_config(lora), model, TRAINED)
    for parameter in adapter_parameters(model):  # peft's choice is fp32
        parameter.data = parameter.data.to(model.dtype)


def add_old_policy(model: PreTrainedModel) -> None:
    """A second, frozen adapter with the values of the trained one, beside it."""
    config: Any = model.peft_config[TRAINED]
    for layer in adapter_layers(model).values():
        with torch.random.fork_rng(devices=[]):
            layer.update_layer(OLD_POLICY, config.r, config.lora_alpha, config)
        for old, trained in zip(factors(layer, OLD_POLICY), factors(layer), strict=True):
            old.data = trained.detach().clone()
        layer.set_adapter(TRAINED)


def adapter_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers of ``model`` that have an adapter, by name; none without adapters."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def factors(layer: LoraLayer, adapter: str = TRAINED) -> tuple[nn.Parameter, nn.Parameter]:
    """``A`` [rank, inputs] and ``B`` [outputs, rank] of a layer."""
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    assert isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter)
    return a, b


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """``A`` and ``B`` of all layers, in the model's order."""
    return [p for layer in adapter_layers(model).values() for p in factors(layer)]


def merged_weight(layer: LoraLayer, weight: Tensor) -> Tensor:
    """``weight + alpha / rank · B A``, computed in fp32 at least and rounded once to its dtype.

    ``weight``, of a linear layer [outputs, inputs], is the layer's own, and ``A`` and ``B`` are
    whole on this rank.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (factor.detach().to(dtype) for factor in factors(layer))
    change = (b @ a) * layer.scaling[TRAINED]
    if isinstance(layer.get_base_layer(), Conv1D):  # its weight is [inputs, outputs]
        change = change.t()
    return (weight.detach().to(dtype) + change).to(weight.dtype)


def adapter_change(weight: Tensor, a: Tensor, b: Tensor, *, rank: int, scaling: float) -> Tensor:
    """What ``B`` is moved by so that a layer's output visibly changes; as ``b`` in shape and dtype.

    By a tenth of what ``weight`` makes of an input, as far as root mean squares tell:
    ``scaling · rms(change) · rms(a) · sqrt(rank) = rms(weight) / 10``. All may be shards.
    """
    size = _rms(weight) / (10 * scaling * max(_rms(a), 1e-6) * rank**0.5)
    # differs from number to number, and is the same on every rank
    angles = torch.arange(b.numel(), device=b.device, dtype=torch.float32) * 2.399963
    return (size * 2**0.5 * angles.cos()).view_as(b).to(b.dtype)


def _rms(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0


def frozen_adapter(engine: nn.Module, policy: PolicyModel, adapter: str | None) -> FrozenModel:
    """The policy's own weights as a frozen model, without a second copy: with another adapter, or
    with None, the model that the run started from.

    It runs in ``engine``, what intercepts the forward of ``policy`` or else that itself, so that
    ZeRO-3 gathers; there all ranks run it together.
    """
    layers = list(adapter_layers(policy.model).values())

    def use(name: str | None) -> None:
        # peft's own switches also set every parameter's ``requires_grad``, which takes 40 ms for 28
        # decoder layers, in each micro-batch.
        for layer in layers:
            layer._disable_adapters = name is None
            layer._active_adapter = name or TRAINED

    @contextmanager
    def in_use() -> Iterator[None]:
        try:
            use(adapter)
            yield
        finally:
            use(TRAINED)

    return FrozenModel(engine, in_use)


def peft_config(lora: LoraConfig, base_model: Path | None = None) -> peft.LoraConfig:
    """``lora`` as peft writes it; ``base_model`` is where the adapter's reader finds the model."""
    import peft

    alpha: Any = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # declared as integer
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        target_modules=list(lora.target_modules),
        lora_dropout=0.0,
        bias="none",
        inference_mode=base_model is not None,  # of a file to be read; else it would not be trained
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=None if base_model is None else str(base_model.absolute()),
    )


def _check_targets(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Each target is the end of linear layers' names, as peft reads it, and of no other's."""
    modules: dict[str, Any] = dict(model.named_modules())
    head = model.get_output_embeddings()
    linear = {n for n, m in modules.items() if isinstance(m, _LINEAR) and m is not head}
    remark = ""
    if any(name.endswith(".experts.gate_up_proj") for name, _ in model.named_parameters()):
        # peft would take the names of dense layers beside the experts for theirs
        linear = {name for name in linear if name.rpartition(".")[2] not in _OF_EXPERTS}
        remark = "; the experts are fused tensors, not linear layers"
    wrong = []
    for target in lora.target_modules:
        found = {name for name in modules if f".{name}".endswith(f".{target}")}
        if not found or not found <= linear:
            wrong.append(target)
    if wrong:
        there_are = dict.fromkeys(n.rpartition(".")[2] for n in modules if n in linear)
        raise ConfigError(
            f"model.lora.target_modules: {', '.join(wrong)}: not linear layers of this "
            f"{type(model).__name__} that can have an adapter; there are {', '.join(there_are)}"
            f"{remark}; name some of these"
        )
