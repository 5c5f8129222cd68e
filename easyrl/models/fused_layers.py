"""Has a Hugging Face model compute RMSNorm, rotary embedding and SwiGLU by fused kernels.

The model keeps its modules, parameters and names; of some modules the forward is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from easyrl.kernels.layers.layer_check import CheckedLayers

_ROTARY = "apply_rotary_pos_emb"  # of transformers' modeling files, called by their attention
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def fuse_layers(model: PreTrainedModel, wanted: str) -> None:
    """``wanted`` is that of ``CheckedLayers``; with ``"none"``, and on a device for which ``auto``
    takes none, the model's own layers run.
    """
    layers = CheckedLayers(wanted)
    if wanted == "none":
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm(layers, type(module)), module)
        elif kind.endswith("MLP") and isinstance(getattr(module, "act_fn", None), _SILU):
            module.forward = MethodType(_swiglu(layers, type(module)), module)
        elif kind.endswith("Attention") and _ROTARY in type(module).forward.__code__.co_names:
            module.forward = MethodType(_with_rotary(layers, type(module).forward), module)


def _rms_norm(layers: CheckedLayers, kind: Any) -> Callable[..., Tensor]:
    def forward(module: Any, hidden_states: Tensor) -> Tensor:
        if layers.backend_on(hidden_states.device) == "none":
            output: Tensor = kind.forward(module, hidden_states)
            return output
        return layers.rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


def _swiglu(layers: CheckedLayers, kind: Any) -> Callable[..., Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        if layers.backend_on(x.device) == "none":
            output: Tensor = kind.forward(module, x)
            return output
        output = module.down_proj(layers.swiglu(module.gate_proj(x), module.up_proj(x)))
        return output

    return forward


def _with_rotary(layers: CheckedLayers, forward: Any) -> FunctionType:
    """``forward`` of an attention module that calls another ``apply_rotary_pos_emb``: it is a
    function of the modeling file, which other models of the process share."""
    plain = forward.__globals__[_ROTARY]

    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if layers.backend_on(query.device) == "none":
            turned: tuple[Tensor, Tensor] = plain(query, key, cos, sin)
            return turned
        return layers.rotary(query, key, cos, sin)

    other = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    other.__kwdefaults__ = forward.__kwdefaults__
    return other
