"""A decode step's forward of the usual decoder block (Llama, Mistral, Qwen) in few operations.

One token per sequence leaves little to compute: of a small model's step most is calling modules and
operations. Here projections of the same input are one matrix product, residual sums are part of
products, and nothing lies between the operations. The parameters stay the model's: the joined
matrices are their memory, so that whoever writes weights into the model writes them here.

Shape legend: B sequences, D hidden size, H key-value heads, R query heads of each, d head size,
I inner size of an MLP, V vocabulary, L positions of the longest slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from easyrl.inference_client.servers.embedded.attention import SharedPrompts, decode_attention
from easyrl.inference_client.servers.embedded.cache import SlotCache

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}  # of the heads, where a model has them
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class OtherBlock(ValueError):
    """The model is not made of the blocks that are known here; the message says of what."""


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """RMSNorm."""

    weight: Tensor
    eps: Tensor  # float32 []; float64 of a float64 model

    @classmethod
    def of(cls, module: Any) -> _Norm:
        if set(dict(module.named_parameters())) != {"weight"}:
            raise OtherBlock(f"a {type(module).__name__}")
        weight = module.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        eps = torch.tensor(module.variance_epsilon, dtype=wide, device=weight.device)
        return cls(weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [..., n]."""
        return self.scaled(x).mul_(self.weight)

    def scaled(self, x: Tensor) -> Tensor:
        """``x`` over the root of its mean square, without the weight. On a CPU
        ``torch.nn.functional.rms_norm`` takes twice as many operations."""
        wide = x.to(self.eps.dtype)
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.eps, size, size, value=1 / x.shape[-1])
        return (wide * mean_square.rsqrt_()).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _HeadNorms:
    """RMSNorm of each query head and of each key head, of all at once but for the weights."""

    query: _Norm
    key: _Norm

    @classmethod
    def of(cls, query: Any, key: Any) -> _HeadNorms:
        norms = cls(_Norm.of(query), _Norm.of(key))
        if norms.query.eps != norms.key.eps:
            raise OtherBlock("queries and keys normed with different epsilons")
        return norms

    def __call__(self, heads: Tensor, num_queries: int) -> Tensor:
        """``heads`` [B, queries and keys, d]."""
        normed = self.query.scaled(heads)
        normed[:, :num_queries].mul_(self.query.weight)
        normed[:, num_queries:].mul_(self.key.weight)
        return normed


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """A linear layer, or several of the same input."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: Any) -> _Product:
        """The layers' parameters become parts of the joined ones."""
        for layer in layers:
            if type(layer) is not nn.Linear:
                raise OtherBlock(f"a {type(layer).__name__}")
        has_bias = {layer.bias is not None for layer in layers}
        if len(has_bias) > 1:
            raise OtherBlock("a bias in some of the projections")
        bias = _joined([layer.bias for layer in layers]) if has_bias.pop() else None
        return cls(_joined([layer.weight for layer in layers]), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """``hidden`` [B, outputs] with the product, in place."""
        if self.bias is not None:
            return hidden.add_(self(x))
        return hidden.addmm_(x, self.weight.t())


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters behind one another; they are views of it from now on."""
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = joined.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


class _Block:
    """One decoder layer."""

    def __init__(self, layer: Any, number: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _check_parts(layer, LAYER)
        _check_parts(attention, ATTENTION, NORMS)
        _check_parts(mlp, MLP)
        self._number = number
        self._size = int(attention.head_dim)  # d
        self._scale = float(attention.scaling)
        self._kv_heads = attention.k_proj.out_features // self._size  # H
        self._heads = attention.q_proj.out_features // self._size  # H * R
        self._before_attention = _Norm.of(layer.input_layernorm)
        self._before_mlp = _Norm.of(layer.post_attention_layernorm)
        self._qkv = _Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_norms: _HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = _HeadNorms.of(attention.q_norm, attention.k_norm)
        self._output = _Product.of(attention.o_proj)
        self._gate_up = _Product.of(mlp.gate_proj, mlp.up_proj)
        self._down = _Product.of(mlp.down_proj)
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn

    def __call__(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: SlotCache,
        shared: SharedPrompts,
    ) -> Tensor:
        """``hidden`` [B, D], in place."""
        num_rows, heads, kv_heads = len(hidden), self._heads, self._kv_heads
        states = self._qkv(self._before_attention(hidden)).view(num_rows, -1, self._size)
        compared, value = states.split([heads + kv_heads, kv_heads], 1)
        if self._head_norms is not None:
            compared = self._head_norms(compared, heads)
        query, key = _turned(compared, *angles).split([heads, kv_heads], 1)
        keys, values = cache.update(key[:, :, None], value[:, :, None], self._number)
        query = query.reshape(num_rows, kv_heads, -1, self._size)
        output = decode_attention(query, keys, values, mask, shared, self._number, self._scale)
        self._output.add_to(hidden, output.reshape(num_rows, -1))
        gate, up = self._gate_up(self._before_mlp(hidden)).chunk(2, 1)
        return self._down.add_to(hidden, self._activation(gate).mul_(up))


class DecodeForward:
    """A model's forward of one token per sequence.

    Joins parameters of the model: to be made before anybody keeps their memory. Raises
    ``OtherBlock`` for a model that is made in another way; whether what it computes is what the
    model does is for ``decode_check.py``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        whole: Any = model
        _check_parts(whole, {"model", "lm_head"})
        base = whole.model
        _check_parts(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        if type(base.embed_tokens) is not nn.Embedding:
            raise OtherBlock(f"a {type(base.embed_tokens).__name__}")
        self._embedding = base.embed_tokens.weight
        self._angles = _Angles(base.rotary_emb)
        self._norm = _Norm.of(base.norm)
        self._head = _Product.of(whole.lm_head)
        self._blocks = [_Block(layer, number) for number, layer in enumerate(base.layers)]

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: SlotCache,
        shared: SharedPrompts,
    ) -> Tensor:
        """Logits [B, V]; the tokens' keys and values are in the slots then.

        Args:
            tokens: int64 [B], the sequences' newest.
            positions: int64 [B], theirs.
            mask: [B, 1, 1, L], added to scores.
            cache: after ``begin_step``.
            shared: the prompts that are held apart.
        """
        hidden = embedding(tokens, self._embedding)
        angles = self._angles(hidden, positions)
        for block in self._blocks:
            hidden = block(hidden, angles, mask, cache, shared)
        return self._head(self._norm(hidden))


class _Angles:
    """Cosines and signed sines of rotary embedding, by positions.

    The plain kind's in few operations, with the bits of the model's own module, which computes the
    other kinds: their frequencies may depend on the longest sequence.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        is_default = getattr(module, "rope_type", None) == "default"
        self._is_plain = is_default and module.attention_scaling == 1.0

    def __call__(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For ``positions`` int64 [B], in the dtype of ``hidden``: [B, 1, d] each."""
        if self._is_plain:
            turns = (positions[:, None].float() * self._module.inv_freq.float())[:, None]
            half = turns.cos().to(hidden.dtype), turns.sin().to(hidden.dtype)
            cos, sin = (torch.cat((x, x), -1) for x in half)
        else:
            cos, sin = self._module(hidden[:, None], positions[:, None])
        return cos, _signed(sin)


def _check_parts(module: nn.Module, needed: set[str], possible: Set[str] = frozenset()) -> None:
    """Raises ``OtherBlock`` unless the module's children have these names."""
    found = {name for name, _ in module.named_children()}
    if not needed <= found <= needed | possible:
        parts = ", ".join(sorted(found)) or "nothing"
        raise OtherBlock(f"a {type(module).__name__} of {parts}")


def _signed(sin: Tensor) -> Tensor:
    """The first half of the last dimension is subtracted from."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [B, heads, d] by angles [B, 1, d] of ``_signed`` sines."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
