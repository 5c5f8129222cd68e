"""Whether an attention backend computes what the reference does, on given tensors.

Shape legend: T tokens of a row, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.kernels.attention.shared_prompt_attention import Backend, reference_attention

# Largest error of a token's vector in units of its size: some ten times what sums of rounded
# products come to, and for float32 room for GPUs' shortened products.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_HALF = (torch.float16, torch.bfloat16)
_MOST_TOKENS = 1024
_NAMES = ("output", "gradient of query", "gradient of key", "gradient of value")


class Agreement(NamedTuple):
    """Of output and gradients the first that is too far off, or else the worst: which, how far off,
    how far it may be."""

    name: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def agreement_with_reference(
    backend: Backend, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
) -> Agreement:
    """Compares output and gradients of ``backend`` with the reference's in higher precision.

    Arguments as a backend takes them. Rows of more than about a thousand tokens are cropped: each
    segment to its first tokens. What the backend may be off by is ``TOLERANCES``, or three times
    what the reference is off by in the inputs' own dtype where that is more: sums that cancel.
    Leaves no trace in autograd, checkpointing or random states; whatever ``backend`` raises comes
    through.
    """
    # Recording gradients, whatever the caller does; and unseen by its checkpointing.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(query.device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        _disable_current_modes(),  # selective checkpointing's
    ):
        layout, inputs = _cropped(layout, (query, key, value))
        generator = torch.Generator().manual_seed(0)
        grad_output = torch.randn(inputs[0].shape, generator=generator).to(inputs[0])
        # Exact enough for half precision is float32, and not every device has more.
        has_more = query.device.type in ("cpu", "cuda") and query.dtype not in _HALF
        precise = torch.float64 if has_more else torch.float32

        def run(compute: Backend, dtype: torch.dtype) -> tuple[Tensor, ...]:
            leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
            output = compute(leaves[0], leaves[1], leaves[2], layout, scale)
            return output.detach(), *torch.autograd.grad(output, leaves, grad_output.to(dtype))

        expected = run(reference_attention, precise)
        units = _units([x.to(precise) for x in (*inputs, grad_output)], scale)

        def errors(compute: Backend) -> list[float]:
            got = run(compute, query.dtype)
            return [_error(*three) for three in zip(got, expected, units, strict=True)]

        of_backend = errors(backend)
        tolerances = [TOLERANCES[query.dtype]] * len(_NAMES)
        if not all(e <= t for e, t in zip(of_backend, tolerances, strict=True)):
            of_reference = errors(reference_attention)
            tolerances = [max(t, 3 * e) for t, e in zip(tolerances, of_reference, strict=True)]
        found = [Agreement(*x) for x in zip(_NAMES, of_backend, tolerances, strict=True)]
        refuted = [agreement for agreement in found if not agreement.holds]
        return refuted[0] if refuted else max(found, key=lambda agreement: agreement.error)


def _cropped(
    layout: SegmentLayout, tensors: Sequence[Tensor]
) -> tuple[SegmentLayout, list[Tensor]]:
    """A row of the same structure, of about ``_MOST_TOKENS`` at most, and its tensors as copies in
    the memory order of a model's, [1, T, H, D].

    As good a problem as the whole: positions are in queries and keys already.
    """
    segments, kept = [], []
    start = 0
    for old_start, old_length, parent in layout.segments:
        length = old_length
        if layout.num_tokens > _MOST_TOKENS:
            length = max(1, old_length * _MOST_TOKENS // layout.num_tokens)
        segments.append((start, length, parent))
        kept.append(torch.arange(old_start, old_start + length))
        start += length
    index = torch.cat(kept).to(tensors[0].device)
    copies = [x.detach().transpose(1, 2).index_select(1, index).transpose(1, 2) for x in tensors]
    return SegmentLayout(segments), copies


def _units(tensors: Sequence[Tensor], scale: float) -> list[float]:
    """For each of ``_NAMES`` a hundredth of the size that its terms have before they cancel.

    Gradients of a token that sees itself alone are 0, and rounding is all that is left there.
    """
    q, k, v, grad = (float(x.norm(dim=3).mean()) for x in tensors)
    return [0.01 * size for size in (v, scale * grad * v * k, scale * grad * v * q, grad)]


def _error(got: Tensor, expected: Tensor, unit: float) -> float:
    """The largest error of one token's vector in one head, in units of its size.

    A size that is less than the row's mean counts as that, and as ``unit`` if that is more.
    """
    size = expected.norm(dim=3)
    size = size.clamp(min=max(unit, float(size.mean())))
    error = (got.to(expected) - expected).norm(dim=3) / size
    return float(error.max())
