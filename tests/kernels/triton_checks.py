"""Triton's row kernels against plain torch in fp64, on a GPU or in Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.kernels.triton_checks``: the interpreter runs the kernels on
CPU tensors, and has to be chosen before Triton is imported, so in a process of its own.
``python -m tests.kernels.triton_checks compile`` compiles them for a GPU, and needs none.
"""

from __future__ import annotations

import itertools
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from easyrl.kernels.logprobs import triton_logprob
from easyrl.kernels.logprobs.row_functions import triton_or_torch
from easyrl.kernels.logprobs.vocab_softmax import RowValues

NUM_ROWS = 5
# One step, one full step, a few with a part of one left; a step is 4,096 entries.
VOCABS = (7, 4096, 9001)


def check_all(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    cases = itertools.product((torch.float32, torch.bfloat16), VOCABS, (1.0, 0.6))
    for dtype, vocab, temperature in cases:
        logits = (torch.randn(NUM_ROWS, vocab, generator=generator) * 5).to(device, dtype)
        logits[1] -= 300.0  # exp of these alone is 0
        labels = torch.randint(vocab, (NUM_ROWS,), generator=generator).to(device)
        labels[0], labels[1] = 0, vocab - 1
        gradients = torch.randn(2, NUM_ROWS, generator=generator).to(device)
        check_sums(logits, labels, temperature)
        for with_entropy in (False, True):
            check_gradient(logits, labels, gradients, with_entropy, temperature)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert triton_or_torch(torch.device(device), dtype, VOCABS[-1]) is triton_logprob
    check_label_outside(device)
    check_not_finite(device)


def values_of(logits, labels, temperature) -> RowValues:  # type: ignore[no-untyped-def]
    return RowValues.of(triton_logprob.row_sums(logits, labels, temperature))


def exact_values(logits, labels, temperature):  # type: ignore[no-untyped-def]
    """Log-sum-exp, log-probabilities and entropies [C] in fp64, from the whole distribution."""
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature)
    logsumexp = torch.logsumexp(logits.double() / temperature, dim=1)
    return logsumexp, distribution.log_prob(labels), distribution.entropy()


def check_sums(logits, labels, temperature) -> None:  # type: ignore[no-untyped-def]
    got = values_of(logits, labels, temperature)
    expected = exact_values(logits, labels, temperature)
    for first, second in zip(got, expected, strict=True):
        assert first.dtype == torch.float32
        # fp32 sums of up to 9,001 terms; the shifted row's logits have 2^-15 at 500.
        torch.testing.assert_close(first.double(), second, rtol=1e-6, atol=1e-4)


def check_gradient(logits, labels, gradients, with_entropy, temperature) -> None:  # type: ignore[no-untyped-def]
    by_logprob, by_entropy = gradients
    by_label = by_logprob.clone()
    by_label[2] = 0  # as where another process holds the label
    exact = logits.double().requires_grad_()
    logsumexp, _, entropy = exact_values(exact, labels, temperature)
    of_label = exact.gather(1, labels[:, None]).squeeze(1) / temperature
    loss = (by_label * of_label - by_logprob * logsumexp).sum()
    if with_entropy:
        loss = loss + (by_entropy * entropy).sum()
    (expected,) = torch.autograd.grad(loss, exact)
    got = logits.clone()
    triton_logprob.softmax_gradient_(
        got,
        labels,
        logsumexp.float().detach(),
        entropy.float().detach(),
        by_logprob,
        by_label,
        by_entropy if with_entropy else None,
        temperature,
    )
    # bf16: the one rounding of the result, which the interpreter does by cutting digits off;
    # logsumexp of -500 in fp32 is 2^-15 off.
    rtol = 2**-7 if logits.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=3e-5)


def check_label_outside(device: str) -> None:
    logits = torch.randn(3, 100, device=device)
    labels = torch.tensor([5, 100, -1], device=device)
    sums = triton_logprob.row_sums(logits, labels, 1.0)
    assert sums.label_logit.isnan().tolist() == [False, True, True]


def check_not_finite(device: str) -> None:
    logits = torch.randn(3, 5000, device=device)
    logits[1, 4500] = torch.nan
    logits[2, 17] = torch.inf
    values = values_of(logits, torch.zeros(3, dtype=torch.int64).to(device), 1.0)
    assert values.logprobs.isfinite().tolist() == [True, False, False]


def check_compilation() -> None:
    """To machine code for compute capability 9.0, with the options of a launch."""
    scalars = {"vocab": "i32", "row_stride": "i32", "inverse_temperature": "fp32"}
    for logits in ("*fp32", "*bf16", "*fp16"):
        pointers = {"logits_ptr": logits, "labels_ptr": "*i64"}
        signature = {**pointers, "sums_ptr": "*fp32", **scalars, "sums_stride": "i32"}
        compile_kernel(triton_logprob._row_sums, signature, {})
        for has_entropy in (False, True):
            rows = ("logsumexp", "entropy", "grad_logprobs", "grad_label", "grad_entropy")
            signature = {**pointers, **{f"{name}_ptr": "*fp32" for name in rows}, **scalars}
            compile_kernel(
                triton_logprob._softmax_gradient, signature, {"HAS_ENTROPY": has_entropy}
            )


def compile_kernel(kernel, signature: dict[str, str], constants: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    constants = {**constants, "BLOCK": triton_logprob.BLOCK}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    options = {"num_warps": triton_logprob.NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        check_compilation()
    else:
        check_all("cpu")
    print("all checks passed")
