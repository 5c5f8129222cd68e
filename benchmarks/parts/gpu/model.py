"""What the rows of ``benchmarks.gpu`` share: a random model, a packed row, FLOPs, the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.parts.gpu.rows import GroupShape, ModelShape, Row
from benchmarks.parts.shared_prompt.flops import MODEL, Work
from benchmarks.parts.shared_prompt.flops import flops as counted
from easyrl.kernels.attention.segment_layout import SegmentLayout

# Dense bf16 products by the makers' data sheets, FLOP/s; by a part of the device's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


class Packed(NamedTuple):
    """A group in one row; every response token is trained."""

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    layout: SegmentLayout
    predictor_index: Tensor  # int64 [N]
    label_ids: Tensor  # int64 [N]


def random_row(group: GroupShape, vocab: int, device: torch.device) -> Packed:
    generator = torch.Generator().manual_seed(0)
    prompt, length = group.prompt, group.length
    ids = torch.randint(vocab, (group.row_tokens,), generator=generator)
    starts = [prompt + index * length for index in range(group.responses)]
    own = torch.arange(length)
    positions = torch.cat([torch.arange(prompt), *(own + prompt for _ in starts)])
    first = torch.tensor([prompt - 1])
    predictors = torch.cat([torch.cat([first, own[:-1] + start]) for start in starts])
    layout = SegmentLayout([(0, prompt, -1), *((start, length, 0) for start in starts)])
    tensors = [x.to(device) for x in (ids, positions, predictors, ids[prompt:])]
    return Packed(tensors[0], tensors[1], layout, tensors[2], tensors[3])


def random_policy(shape: ModelShape, row: Row, device: torch.device) -> Any:
    """A ``PolicyModel`` in bf16 with random weights, made on ``device``."""
    from transformers import Qwen3ForCausalLM

    from easyrl.models.activation_checkpointing import checkpoint_activations
    from easyrl.models.fused_layers import fuse_layers
    from easyrl.models.policy_model import PolicyModel
    from easyrl.models.row_forward import ATTENTION

    config = _config(shape, attn_implementation=ATTENTION)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    fuse_layers(model, row.fused_layers)
    checkpoint_activations(model, row.recompute)
    return PolicyModel(model, None, row.attention).train()


def _config(shape: ModelShape, **more: str) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=40_960,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
    )


def num_parameters(shape: ModelShape) -> int:
    attention = 2 * shape.hidden * shape.head_size * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return layer * shape.layers + shape.vocab * shape.hidden * (2 - shape.tied)


def flops(shape: ModelShape, group: GroupShape, layout: SegmentLayout) -> float:
    """Of one forward and backward, nothing computed twice."""
    work = Work(group.row_tokens, layout.num_pairs, group.responses * group.length)
    return counted(work, _config(shape), MODEL)


def peak_flops(device_name: str) -> float | None:
    found = [value for part, value in PEAK_FLOPS.items() if part in device_name]
    return max(found) if found else None


class Clock:
    """Seconds of work on a device, and what its allocator held at most."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def forget_peak(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """None where no allocator tells."""
        return torch.cuda.max_memory_allocated() if self._cuda else None

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
