"""Attention over each segment's path from the root: keys and values of one path behind the other.

The paths of a row together may be a hundred times as long as the row. So the copies are made for a
few segments at a time, and live during a pass, not between passes: the backward pass gathers them
again.

Shape legend: T tokens of the row, n queries and K keys of one piece of it, Hq query and Hkv key
heads, D size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from easyrl.kernels.attention.segment_layout import Paths

# Query [n, Hq, D], gathered key and value [K, Hkv, D] of the paths to [n, Hq, D]; differentiable.
PathKernel = Callable[[Tensor, Tensor, Tensor, Paths], Tensor]

# Of keys and values that are gathered at a time, in a device's memory. A backward pass holds them,
# their gradients, and one of these in float32: three times this. 256 MB are 65,536 keys of 8 heads
# of 128 in bf16: next to 16 bytes a parameter nothing, and enough work to fill a GPU.
GATHERED_BYTES = 2**28


def most_keys(key: Tensor) -> int:
    """Keys like those of ``key`` [1, Hkv, T, D] that are gathered at a time with their values."""
    return max(1, GATHERED_BYTES // (2 * key.shape[-3] * key.shape[-1] * key.element_size()))


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """``tokens`` [T, ...] at ``index``, int64 [K]: [K, ...].

    A token's gradient is the sum over all places that it is copied to. In half precision it is
    summed in float32 and rounded once: a prompt's last position is copied for each response.
    Deterministic where ``torch.use_deterministic_algorithms`` asks for it. Differentiable once.
    """
    gathered: Tensor = _GatherTokens.apply(tokens, index)
    return gathered


def attend_over_paths(
    kernel: PathKernel, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Paths]
) -> Tensor:
    """``kernel`` on ``query`` [T, Hq, D] and on ``key`` and ``value`` [T, Hkv, D] gathered along
    the paths, one of ``pieces`` after the other, which together are the row: [T, Hq, D].

    As ``kernel(query, gather_tokens(key, index), gather_tokens(value, index), paths)`` of all
    paths at once, but of what the kernel saves for its backward pass the gathered keys and values
    are left out, and no more than one piece's exist at a time. Nothing is computed twice but the
    gather. Differentiable once.
    """
    tensors = (query, key, value)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _joined(
            len(query),
            pieces,
            lambda rows, paths: kernel(query[rows], *_gathered(key, value, paths), paths),
        )
    output: Tensor = _AttendOverPaths.apply(kernel, query, key, value, pieces)
    return output


def _joined(
    num_tokens: int, pieces: Sequence[Paths], compute: Callable[[slice, Paths], Tensor]
) -> Tensor:
    """[T, ...] of what ``compute`` gives for each piece's queries; never twice in memory."""
    if len(pieces) == 1:
        return compute(slice(0, num_tokens), pieces[0])
    joined: Tensor | None = None
    for rows, paths in _rows(pieces):
        part = compute(rows, paths)
        if joined is None:
            joined = part.new_empty(num_tokens, *part.shape[1:])
        joined[rows] = part
    assert joined is not None
    return joined


def _rows(pieces: Sequence[Paths]) -> Iterator[tuple[slice, Paths]]:
    """Each piece with the positions of its queries."""
    start = 0
    for paths in pieces:
        yield slice(start, start + paths.query_ends[-1]), paths
        start += paths.query_ends[-1]


def _gathered(key: Tensor, value: Tensor, paths: Paths) -> tuple[Tensor, Tensor]:
    return key.index_select(0, paths.key_index), value.index_select(0, paths.key_index)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _sum_by_token(grad, index, ctx.num_tokens), None


class _AttendOverPaths(torch.autograd.Function):
    """Keeps the kernel's own graphs, emptied of tensors: these are saved here, so that activation
    checkpointing and offloading see them as any others."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: PathKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Sequence[Paths],
    ) -> Tensor:
        ctx.pieces, ctx.graphs = pieces, []

        def compute(rows: slice, paths: Paths) -> Tensor:
            ctx.graphs.append(_PieceGraph(kernel, query[rows], key, value, paths))
            return ctx.graphs[-1].take_output()

        output = _joined(len(query), pieces, compute)
        saved = [
            graph.release(output[rows])
            for graph, (rows, _) in zip(ctx.graphs, _rows(pieces), strict=True)
        ]
        ctx.save_for_backward(key, value, *chain.from_iterable(saved))
        ctx.ends = list(accumulate(map(len, saved)))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        key, value, *saved = ctx.saved_tensors
        sums = [x.new_zeros(x.shape, dtype=_sum_dtype(x.dtype)) for x in (key, value)]
        graphs = zip(ctx.graphs, (0, *ctx.ends), ctx.ends, strict=False)

        def compute(rows: slice, paths: Paths) -> Tensor:
            graph, start, end = next(graphs)
            tensors = [*_gathered(key, value, paths), *saved[start:end]]
            grad_query, *grads = graph.gradients(grad_output[rows], tensors)
            del tensors
            for total in sums:
                grad = grads.pop(0)
                total.index_add_(0, paths.key_index, grad.to(total.dtype))
            return grad_query

        grad_query = _joined(len(grad_output), ctx.pieces, compute)
        grad_key, grad_value = (x.to(key.dtype) for x in sums)
        return None, grad_query, grad_key, grad_value, None


class _PieceGraph:
    """A kernel's graph for one piece, which holds tensors only while it is run."""

    def __init__(
        self, kernel: PathKernel, query: Tensor, key: Tensor, value: Tensor, paths: Paths
    ) -> None:
        gathered = _gathered(key, value, paths)
        slots = self._slots = _Slots(gathered)
        with torch.enable_grad(), saved_tensors_hooks(slots.put, slots.get):
            leaf = torch.empty(0, requires_grad=True)
            inputs = [_Start.apply(leaf, x) for x in (query, *gathered)]
            output = kernel(inputs[0], inputs[1], inputs[2], paths)
        self._inputs = [get_gradient_edge(x) for x in inputs]
        self._output = get_gradient_edge(output)
        kept, slots.tensors = slots.tensors[len(gathered) :], []
        known = [_identity(x) == _identity(output) for x in kept] if output.is_contiguous() else []
        self._output_slot = known.index(True) if True in known else None
        self._kept = [x for slot, x in enumerate(kept) if slot != self._output_slot]
        self._result: Tensor | None = output.detach()

    def take_output(self) -> Tensor:
        """The kernel's output, [n, Hq, D], which is not held any longer."""
        output, self._result = self._result, None
        assert output is not None
        return output

    def release(self, output: Tensor) -> list[Tensor]:
        """Hands over what the graph saved but for the gathered tensors; ``gradients`` wants it back
        behind them. ``output`` has the values of the kernel's own and is kept in its place.
        """
        kept, self._kept = self._kept, []
        if self._output_slot is not None:
            kept.insert(self._output_slot, output)
        return kept

    def gradients(self, grad_output: Tensor, saved: list[Tensor]) -> tuple[Tensor, ...]:
        """In query, gathered key and gathered value; ``saved`` begins with the gathered tensors."""
        self._slots.tensors = saved
        try:
            # The graph stays for a caller that retains its own; it holds no tensors.
            return torch.autograd.grad(self._output, self._inputs, grad_output, retain_graph=True)
        finally:
            self._slots.tensors = []


class _Start(torch.autograd.Function):
    """Where a graph starts whose inputs are not to be held: leaves are, by their graph."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("gradients are taken here")


class _Slots:
    """What a graph saves, by number; between the passes ``tensors`` are kept elsewhere."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.tensors = list(given)

    def put(self, tensor: Tensor) -> int:
        known = [_identity(other) for other in self.tensors]
        if _identity(tensor) in known:
            return known.index(_identity(tensor))
        self.tensors.append(tensor)
        return len(known)

    def get(self, slot: int) -> Tensor:
        return self.tensors[slot]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sum_by_token(grad: Tensor, index: Tensor, num_tokens: int) -> Tensor:
    """``grad`` [K, ...] of the copies at ``index`` as that of ``num_tokens`` tokens [T, ...]."""
    dtype = _sum_dtype(grad.dtype)
    summed = grad.new_zeros(num_tokens, *grad.shape[1:], dtype=dtype)
    return summed.index_add_(0, index, grad.to(dtype)).to(grad.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
