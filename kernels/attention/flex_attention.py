"""Attention over a forest of segments with PyTorch's FlexAttention: blocks that no token of theirs
sees are skipped, blocks that are seen whole need no mask.

In depth-first order what a token sees takes one number per key: query q sees key k where
``k <= q < subtree_end[k]``, the end of the stretch that k's segment and its descendants fill.
Rows are padded to a few lengths, so that the kernel is compiled once for each of these; a padding
token sees only itself, and is cut off again.

Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
arXiv 2412.05496.

Shape legend: T tokens of the row, L length that it is padded to, B tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from easyrl.kernels.attention.segment_layout import SegmentLayout

BLOCK_SIZE = 128
_SMALLEST_HEAD = 16  # of the GPU kernels' matrix products
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # on a GPU
# Two lengths per power of two, with and without gradients, for several shapes of heads.
_MOST_COMPILATIONS = 256


def flex_attention_backend(
    query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Tensor:
    """As ``reference_attention``.

    On a GPU compiled, in float32, bfloat16 or float16, with heads of 16 or more. On a CPU, where
    FlexAttention has no backward pass, the block mask is expanded: for comparison, not for speed.
    Raises ``ValueError`` for any other device, dtype or head size, and ``ImportError`` if PyTorch
    is too old.
    """
    _check_supported(query)
    block_mask = layout_block_mask(layout, query.device)
    query, key, value = (_padded(x, block_mask.seq_lengths[0]) for x in (query, key, value))
    attend = expanded_attention if query.device.type == "cpu" else compiled_attention()
    return attend(query, key, value, block_mask, scale)[:, :, : layout.num_tokens]


def padded_length(num_tokens: int) -> int:
    """The smallest of B, 2 B, 3 B, 4 B, 6 B, 8 B, 12 B, ... that holds ``num_tokens``.

    Padding adds to the work far less than to the length: a padding block sees itself only.
    """
    power = BLOCK_SIZE
    while power < num_tokens:
        power *= 2
    between = power // 4 * 3
    return between if num_tokens <= between and between % BLOCK_SIZE == 0 else power


def layout_block_mask(layout: SegmentLayout, device: torch.device) -> BlockMask:
    """What ``layout`` allows, as a block mask of its padded length; made once for each device."""
    return layout.derived(_build_block_mask, device)


def subtree_ends(layout: SegmentLayout) -> Tensor:
    """int32 [L]: token k is seen by the queries from k itself to before ``subtree_ends[k]``."""
    last = {r.key_start: r.query_end for r in layout.rectangles}
    ends = torch.tensor([last.get(start, start + length) for start, length, _ in layout.segments])
    lengths = torch.tensor([length for _, length, _ in layout.segments])
    result = torch.arange(1, padded_length(layout.num_tokens) + 1, dtype=torch.int32)
    result[: layout.num_tokens] = ends.repeat_interleave(lengths)
    return result


def _build_block_mask(layout: SegmentLayout, device: torch.device) -> BlockMask:
    """From the [L] ends alone: [L / B, L / B] comparisons, never L × L."""
    subtree_end = subtree_ends(layout).to(device)

    def visible(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return (key_index <= query_index) & (query_index < subtree_end[key_index])

    partial, full = _block_occupancy(subtree_end)
    length = subtree_end.shape[0]
    return BlockMask(
        (length, length),
        *_ordered(partial),
        *_ordered(full),
        *_ordered(partial.t()),  # by blocks of keys, for the backward pass
        *_ordered(full.t()),
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=visible,
    )


def _block_occupancy(subtree_end: Tensor) -> tuple[Tensor, Tensor]:
    """bool [L / B, L / B] each: blocks of queries that see some, and all, of a block of keys."""
    of_blocks = subtree_end.view(-1, BLOCK_SIZE)
    first_query = torch.arange(0, subtree_end.shape[0], BLOCK_SIZE, device=subtree_end.device)
    below = torch.ones(len(of_blocks), len(of_blocks), dtype=torch.bool, device=subtree_end.device)
    below = below.tril(-1)
    full = below & (of_blocks.amin(1) >= first_query[:, None] + BLOCK_SIZE)
    touched = below & (of_blocks.amax(1) > first_query[:, None])
    touched.fill_diagonal_(True)  # each token sees itself
    return touched & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """BlockMask's form: numbers of blocks int32 [1, 1, L / B], indices int32 [1, 1, L / B, L / B],
    those that count first."""
    counts = blocks.sum(1, keepdim=True)
    place = torch.where(blocks, blocks.cumsum(1) - 1, counts + (~blocks).cumsum(1) - 1)
    columns = torch.arange(blocks.shape[1], dtype=torch.int32, device=blocks.device)
    indices = torch.empty_like(place, dtype=torch.int32)
    indices.scatter_(1, place, columns.expand_as(place))
    return counts.squeeze(1).to(torch.int32)[None, None], indices.contiguous()[None, None]


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Of length L, always contiguous: other strides would be compiled for anew."""
    missing = length - tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor.contiguous()


Attend = Callable[[Tensor, Tensor, Tensor, BlockMask, float], Tensor]


@cache
def compiled_attention(backend: str | Callable[..., object] = "inductor") -> Attend:
    """FlexAttention compiled with ``backend``, anew for each padded length.

    ``fullgraph``: an error, not the unfused form that holds all scores, where it cannot be.
    """
    try:
        attend: Attend = torch.compile(  # type: ignore[call-overload]  # its stubs lack two of them
            _flex_attention,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            recompile_limit=_MOST_COMPILATIONS,
            isolate_recompiles=True,
        )
    except TypeError as error:
        raise ImportError(
            f"flex needs a torch.compile whose limits can be set, as in PyTorch 2.13 ({error}); "
            "upgrade, or choose merged",
            name="torch.compile",
        ) from error
    return attend


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float
) -> Tensor:
    output: Tensor = flex_attention(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output


def expanded_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float
) -> Tensor:
    """The same over the block mask's [L, L] expansion: its full blocks, and what its function
    leaves of the partial ones."""
    positions = torch.arange(query.shape[2], device=query.device)
    zero = positions[0]
    by_token = block_mask.mask_mod(zero, zero, positions[:, None], positions[None, :])
    partial = _expanded(block_mask.kv_num_blocks, block_mask.kv_indices)
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None
    full = _expanded(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=full | (partial & by_token),
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _expanded(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """bool [L, L] from BlockMask's [1, 1, L / B] and [1, 1, L / B, L / B]."""
    counts = torch.arange(indices.shape[3], device=indices.device) < num_blocks[0, 0, :, None]
    blocks = torch.zeros_like(counts).scatter_(1, indices[0, 0].long(), counts)
    return blocks.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)


def _check_supported(query: Tensor) -> None:
    if query.device.type not in _DEVICES:
        raise ValueError(
            f"flex runs on {' and '.join(_DEVICES)}, the tensors are on {query.device}; "
            "choose merged, or npu on Ascend"
        )
    if query.device.type == "cpu":
        return
    if query.dtype not in _DTYPES or query.shape[-1] < _SMALLEST_HEAD:
        raise ValueError(
            f"flex takes float32, bfloat16 and float16 with heads of {_SMALLEST_HEAD} or more, "
            f"here it is {query.dtype} and {query.shape[-1]}; choose merged"
        )
