"""The default number of positions that are projected to the vocabulary at a time."""

from __future__ import annotations

import pytest
import torch

from easyrl.kernels.logprobs.chunk_size import LOGITS_BYTES, default_chunk_size


def on(device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(7, 3, dtype=dtype).to(device)


def test_on_a_cpu_it_is_what_was_measured() -> None:
    assert default_chunk_size(on("cpu", torch.float32), 151_936) == 512
    assert default_chunk_size(on("cpu", torch.float32), 100) == 512


@pytest.mark.parametrize(
    ("dtype", "vocab", "size"),
    [
        (torch.bfloat16, 151_936, 4096),
        (torch.bfloat16, 32_000, 4096),
        (torch.float32, 151_936, 2048),
        (torch.bfloat16, 262_144, 2048),
        (torch.float32, 10**8, 256),
    ],
)
def test_on_a_device_the_logits_are_bounded(dtype: torch.dtype, vocab: int, size: int) -> None:
    """``meta`` stands for any device that is none of the host's."""
    hidden = on("meta", dtype)
    assert default_chunk_size(hidden, vocab) == size
    assert size == 256 or size * vocab * hidden.element_size() <= LOGITS_BYTES
