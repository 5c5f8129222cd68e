"""Has a Hugging Face model compute RMSNorm, rotary embedding and SwiGLU by fused kernels.

The model keeps its modules, parameters and names; of some modules the forward is another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from easyrl.kernels.layers.layer_check import CheckedLayers
from easyrl.kernels.layers.plain import rms_norm, rotary, swiglu

_ROTARY = "apply_rotary_pos_emb"  # of transformers' modeling files, called by their attention
_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def fuse_layers(model: PreTrainedModel, wanted: str) -> None:
    """``wanted`` is that of ``CheckedLayers``; with ``"none"``, and on a device for which ``auto``
    takes none, the model's own layers run.
    """
    layers = CheckedLayers(wanted)
    if wanted == "none":
        return
    computes: dict[tuple[type, str], bool] = {}  # whether a class does what a fused kernel does
    for module in model.modules():
        kind: Any = type(module)
        name = kind.__name__
        if name.endswith("RMSNorm"):
            if _once(computes, kind, "norm", partial(is_rms_norm, module)):
                module.forward = MethodType(_rms_norm(layers, kind), module)
        elif name.endswith("MLP") and isinstance(getattr(module, "act_fn", None), _SILU):
            if _once(computes, kind, "mlp", partial(is_swiglu, module)):
                module.forward = MethodType(_swiglu(layers, kind), module)
        elif name.endswith("Attention") and _ROTARY in kind.forward.__code__.co_names:
            if _once(computes, kind, "rotary", partial(is_rotary, kind.forward)):
                module.forward = MethodType(_with_rotary(layers, kind.forward), module)


def _once(
    computes: dict[tuple[type, str], bool], kind: type, what: str, ask: Callable[[], bool]
) -> bool:
    if (kind, what) not in computes:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            computes[kind, what] = ask()
    return computes[kind, what]


# A class's name says little: Gemma's norm is (1 + weight) · x̂, Cohere's rotary turns neighbours.


def is_rms_norm(module: Any) -> bool:
    """Whether a module is weight · x̂, tried on a copy with a weight of its own."""
    eps = vars(module).get("variance_epsilon")
    if eps is None:
        return False
    weight, x = torch.rand(8) + 0.5, torch.randn(3, 8)
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(weight)}
    return _agrees(lambda: type(module).forward(probe, x), rms_norm(x, weight, eps))


def is_swiglu(module: Any) -> bool:
    """Whether a module is down(silu(gate(x)) · up(x)), tried on a copy with small matrices."""
    gate, up, down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
    x = torch.randn(3, 8)
    probe = copy.copy(module)
    matrices = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    probe._modules = {**module._modules, **matrices}
    expected = down(swiglu(gate(x), up(x)))
    return _agrees(lambda: type(module).forward(probe, x), expected)


def is_rotary(forward: Any) -> bool:
    """Whether an attention module's ``apply_rotary_pos_emb`` turns the halves of a head."""
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    cos, sin = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    turned = rotary(query, key, cos, sin)
    return _agrees(
        lambda: torch.cat(forward.__globals__[_ROTARY](query, key, cos, sin), 1),
        torch.cat(turned, 1),
    )


def _agrees(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    try:
        got = compute()
    except Exception:  # other arguments, other submodules: another layer
        return False
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


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
        turns_a_part = cos.shape[-1] != query.shape[-1]  # of each head, as GPT-NeoX
        if turns_a_part or layers.backend_on(query.device) == "none":
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
