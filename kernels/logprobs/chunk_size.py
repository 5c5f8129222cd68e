"""How many positions are projected to the vocabulary at a time, where nobody says.

A chunk's logits are written, read by the softmax and read by the two products of its gradient, and
each chunk reads and writes the weight's whole gradient once, in float32. What a chunk costs beyond
its products is therefore 8 bytes for each entry of the weight, beside 6 · C floating-point
operations: on a GPU of 800 TFLOP/s and 4.8 TB/s (H200) 222 / C of the products' time, whatever the
vocabulary and the hidden size: 43 % at 512 positions, 5 % at 4,096. These are figures of a data
sheet: not measured on a GPU (``python -m benchmarks.gpu`` would, rows ``head``). On a CPU
(0.1 TFLOP/s, 20 GB/s) it is 7 / C, and what counts is the cache: measured there, 256 positions cost
5 % over 512, and 1,024 gain nothing (docs/benchmarks.md).
"""

from __future__ import annotations

from torch import Tensor

CPU_CHUNK = 512
ACCELERATOR_CHUNK = 4096  # not measured on a GPU
LOGITS_BYTES = 3 * 2**29  # of a chunk, at most: 4,096 positions of 152k entries in bf16 fit
_SMALLEST = 256


def default_chunk_size(hidden: Tensor, vocab: int) -> int:
    """Positions C of a chunk for ``hidden`` [N, H] and ``vocab`` entries; a power of two."""
    if hidden.device.type == "cpu":
        return CPU_CHUNK
    size = ACCELERATOR_CHUNK
    while size > _SMALLEST and size * vocab * hidden.element_size() > LOGITS_BYTES:
        size //= 2
    return size
