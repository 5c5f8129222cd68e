"""Log-sum-exp and gradient along the rows of a chunk of logits: torch or Triton, checked.

A compiled kernel may fail or be wrong for one driver, compiler or build, and nothing would show it
but a model that learns badly.

Shape legend: C positions of a chunk, V vocabulary held here.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from easyrl.kernels.logprobs import vocab_softmax
from easyrl.kernels.logprobs.vocab_softmax import RowValues, softmax_dtype

logger = logging.getLogger(__name__)

USE_TRITON = True  # where it is installed and agrees; benchmarks look at the other way too
TRITON_DEVICES = ("cuda",)
NUM_ROWS = 8
TEMPERATURE = 0.7
TOLERANCE = 2**-12  # fp32 sums over a row, of logits around -100: 1e-5 is usual
HALF_TOLERANCE = 2**-7  # of a gradient in bf16 or fp16, that was rounded once


def row_functions(logits: Tensor) -> ModuleType:
    """What computes along the rows of ``logits`` [C, V]: ``vocab_softmax``, or ``triton_logprob``
    where it is installed and agrees."""
    if (
        not USE_TRITON
        or logits.device.type not in TRITON_DEVICES
        or logits.dtype == torch.float64
        or not _triton_is_installed()
    ):
        return vocab_softmax
    return triton_or_torch(logits.device, logits.dtype, logits.shape[1])


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def _load_triton() -> ModuleType:
    return import_module("easyrl.kernels.logprobs.triton_logprob")


@cache  # the verdict, and the warning, once in a process
def triton_or_torch(device: torch.device, dtype: torch.dtype, vocab: int) -> ModuleType:
    """Triton's functions, if they agree with ``vocab_softmax`` on ``device`` for logits [C, vocab]
    of ``dtype``.

    Both compute values and gradients of a few random rows, not of a model's: what decides is the
    same in every process, and no NaN of a model. ``vocab_softmax`` does so in fp64 on the host. If
    they do not agree, or one raises, this warns and returns ``vocab_softmax``.
    """
    try:
        functions = _load_triton()
        problem = _disagreement(functions, device, dtype, vocab)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # compilers and drivers raise what they like
        problem = f"failed: {type(error).__name__}: {error}"
    if problem is None:
        return functions
    logger.warning(
        "Triton's kernels for log-probabilities on %s in %s with a vocabulary of %d %s. Plain "
        "torch is used instead, which is slower. Install the Triton that this PyTorch asks for "
        "(pip show torch), and a C compiler, which it needs",
        device,
        dtype,
        vocab,
        problem,
    )
    return vocab_softmax


@torch.no_grad()
def _disagreement(
    functions: ModuleType, device: torch.device, dtype: torch.dtype, vocab: int
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, vocab, generator=generator)
    logits[1] -= 100.0  # whose exponentials are 0 in fp32
    labels = torch.randint(vocab, (NUM_ROWS,), generator=generator)
    labels[0], labels[1] = 0, vocab - 1
    on_device, on_host = logits.to(device, dtype), logits.to(dtype).double()
    got = RowValues.of(functions.row_sums(on_device, labels.to(device), TEMPERATURE))
    values = RowValues.of(vocab_softmax.row_sums(on_host, labels, TEMPERATURE))
    for name, some, expected in zip(RowValues._fields, got, values, strict=True):
        error = float((some.double().cpu() - expected).abs().max())
        if not error <= TOLERANCE:  # NaN too
            return f"give values ({name}) that are off by {error:.1e}; {TOLERANCE:.0e} is tolerated"

    tolerance = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    for with_entropy in (False, True):
        some = _gradient(functions, on_device, labels, values, with_entropy)
        expected = _gradient(vocab_softmax, on_host, labels, values, with_entropy)
        distance, size = (some - expected).norm(dim=1), expected.norm(dim=1)
        error = float((distance / (size + 1e-6)).max())
        if not error <= tolerance:
            return f"give a gradient that is off by {error:.1e}; {tolerance:.0e} is tolerated"
    return None


def _gradient(
    functions: ModuleType, logits: Tensor, labels: Tensor, values: RowValues, with_entropy: bool
) -> Tensor:
    """float64 [NUM_ROWS, V], on the host."""
    device, dtype = logits.device, softmax_dtype(logits.dtype)
    by_logprob = torch.linspace(1.0, 2.0, NUM_ROWS).to(device, dtype)
    by_label = by_logprob.clone()
    by_label[::2] = 0.0  # as where another process holds the label: the other entries can be seen
    gradient = logits.clone()
    functions.softmax_gradient_(
        gradient,
        labels.to(device),
        values.logsumexp.to(device, dtype),
        values.entropy.to(device, dtype),
        by_logprob,
        by_label,
        by_logprob.flip(0) if with_entropy else None,
        TEMPERATURE,
    )
    return gradient.double().cpu()
