"""What a decoder layer computes again in its backward pass instead of keeping it.

The method is that of Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".

Composes with packed rows, ZeRO and adapters: a layer's inputs are kept, among them the row's
layout, and the same code runs again on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Most of a layer's time and a small part of its memory; norms, activations and copies are redone.
_KEPT = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._grouped_mm.default",  # of a mixture's experts
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_varlen_forward.default",
    "flash_attn_3._flash_attn_forward.default",
    "npu.npu_fusion_attention.default",
}


def checkpoint_activations(
    model: PreTrainedModel, mode: Literal["none", "layer", "selective"], every: int = 1
) -> None:
    """Has every ``every``-th decoder layer of ``model`` compute again what it did not keep.

    ``layer`` keeps a layer's input alone; ``selective`` also the results of matrix products and
    attention, which leaves little to compute again; of the attention backends ``flex`` alone is
    computed again, being no operator of its own but one that takes functions. Gradients do not
    change. Acts in training mode.
    """
    if mode == "none":
        return
    again = _recomputed(mode)
    layers = decoder_layers(model)
    if not layers:
        from easyrl.config import ConfigError  # torch and transformers are all that a model needs

        raise ConfigError(
            f"model.activation_checkpointing: {type(model).__name__} has no layers that "
            "transformers can compute again; set it to none"
        )
    for layer in layers[::every]:
        layer.gradient_checkpointing = True
        setattr(layer, "_gradient_checkpointing_func", again)  # noqa: B010, for the type checker


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Of a Hugging Face model, in their order; empty where its modeling file marks none."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def checkpoint_layers(
    layers: Iterable[nn.Module], mode: Literal["none", "layer", "selective"]
) -> None:
    """``checkpoint_activations`` of layers that are no Hugging Face model's."""
    if mode == "none":
        return
    again = _recomputed(mode)
    for layer in layers:
        setattr(layer, "forward", partial(_in_training, layer, again, layer.forward))  # noqa: B010


def _in_training(
    layer: nn.Module,
    again: Callable[..., Any],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if layer.training and torch.is_grad_enabled():
        return again(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _recomputed(mode: Literal["layer", "selective"]) -> Callable[..., Any]:
    """``torch.utils.checkpoint`` as the mode asks for it."""
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return partial(again, context_fn=_contexts) if mode == "selective" else again


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    keep, reuse = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return _OnlyKept(keep), _OnlyKept(reuse)


class _OnlyKept(TorchDispatchMode):
    """Shows ``mode`` nothing but what is kept.

    It refuses a backward pass with operations that its forward did not have. ZeRO-3 has such: it
    gathers a layer's weights in the layer or ahead of it.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if str(func) in _KEPT:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
