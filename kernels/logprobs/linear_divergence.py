"""KL(student || teacher) over the whole vocabulary at each position, without either's logits.

Both models' hidden states go through their own projections, a chunk of positions at a time; two
chunks of logits exist at once, of which the gradient overwrites one. The gradient is the student's
alone. Its two ways are those of ``linear_logprob.py``: formed with the values (2 products forward,
2 for the gradient), or from logits that are computed again (6 in all).

Shape legend: N positions, H and H_T hidden sizes of student and teacher, V vocabulary, C chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.kernels.logprobs.projection import Projection, ProjectionGradients
from easyrl.kernels.logprobs.token_losses import DivergenceLoss, checked, differentiate
from easyrl.kernels.logprobs.vocab_divergence import reverse_kl, reverse_kl_gradient_
from easyrl.kernels.logprobs.vocab_softmax import softmax_dtype


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What a teacher's distributions at N positions are made of; no gradient reaches them."""

    hidden: Tensor  # [N, H_T]
    weight: Tensor  # [V, H_T]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # of its logits

    def divided(self, by: float) -> TeacherRows:
        """The rows whose logits are ``1 / by`` of these."""
        bias = None if self.bias is None else self.bias / by
        cap = None if self.soft_cap is None else self.soft_cap / by
        return TeacherRows(self.hidden / by, self.weight, bias, cap)


def linear_divergences(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherRows,
    token_loss: DivergenceLoss | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 512,
    soft_cap: float | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities of ``labels``, entropies, and KL(student || teacher), all [N], nats.

    As ``linear_logprobs``, with the divergence as a third value: differentiable in ``hidden``,
    ``weight`` and ``bias``, or with ``token_loss`` its sum before the three in their place. Both
    distributions are at ``temperature``. No shards: a process has the whole vocabulary of both.
    Raises ``ValueError`` as there, and where the teacher has another vocabulary or other positions.
    """
    student = Projection(hidden, weight, bias, labels, temperature, chunk_size, None, soft_cap)
    student.check()
    rows, vocab = teacher.hidden.shape[0], teacher.weight.shape[0]
    if rows != len(hidden) or vocab != len(weight):
        raise ValueError(
            f"the teacher has {rows} positions and a vocabulary of {vocab}, the student "
            f"{len(hidden)} and {len(weight)}; they have to be the same"
        )
    caps = soft_cap, teacher.soft_cap
    arguments = *student[:6], teacher.hidden, teacher.weight, teacher.bias, *caps
    _Pair.of(*arguments).teacher.check()
    if token_loss is None:
        return _LinearDivergences.apply(*arguments)
    # Gradients or not: forward cannot see it.
    return _LinearDivergenceLoss.apply(token_loss, torch.is_grad_enabled(), *arguments)


class _Values(NamedTuple):
    """Of the positions of a chunk, or of all; all [C] or [N]."""

    logprobs: Tensor
    entropy: Tensor
    divergence: Tensor
    logsumexp: Tensor
    teacher_logsumexp: Tensor

    @classmethod
    def empty(cls, hidden: Tensor) -> _Values:
        dtype = softmax_dtype(hidden.dtype)
        return cls(*(hidden.new_empty(len(hidden), dtype=dtype) for _ in cls._fields))

    def at(self, rows: slice) -> _Values:
        return _Values(*(values[rows] for values in self))

    def write(self, rows: slice, found: _Values) -> None:
        for values, own in zip(self, found, strict=True):
            values[rows] = own


class _Pair(NamedTuple):
    """The two projections of the same positions."""

    student: Projection
    teacher: Projection

    @classmethod
    def of(cls, *arguments: Any) -> _Pair:
        """Of the student's six first, hidden states, weight and bias of the teacher, both caps."""
        hidden, weight, bias, labels, temperature, chunk_size, *teacher = arguments
        its, its_weight, its_bias, soft_cap, its_cap = teacher
        common = labels, temperature, chunk_size, None
        return cls(
            Projection(hidden, weight, bias, *common, soft_cap=soft_cap),
            Projection(its, its_weight, its_bias, *common, soft_cap=its_cap),
        )

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Positions, and both logits [C, V]; those of all chunks are in the same memory."""
        pairs = zip(self.student.chunks(), self.teacher.chunks(), strict=True)
        for (rows, logits), (_, teacher_logits) in pairs:
            yield rows, logits, teacher_logits

    def values(self, rows: slice, logits: Tensor, teacher_logits: Tensor) -> _Values:
        logsumexp, logprobs, entropy = self.student.values(logits, rows)
        teacher_logsumexp = self.teacher.values(teacher_logits, rows).logsumexp
        divergence = reverse_kl(
            logits, teacher_logits, logsumexp, teacher_logsumexp, self.student.temperature
        )
        return _Values(logprobs, entropy, divergence, logsumexp, teacher_logsumexp)

    def gradient_(
        self,
        rows: slice,
        logits: Tensor,
        teacher_logits: Tensor,
        values: _Values,
        by_value: Sequence[Tensor | None],
    ) -> None:
        """Overwrites ``logits``, and maybe ``teacher_logits``, by a loss's gradient in the former.

        ``by_value``: its gradients in log-probabilities, entropies and divergences, [C] each; None
        for zeros.
        """
        by_logprob, by_entropy, by_divergence = by_value
        slope = self.student.slope(logits)
        has_others = by_logprob is not None or by_entropy is not None or by_divergence is None
        if by_divergence is not None:
            reverse_kl_gradient_(
                logits,
                teacher_logits,
                values.logsumexp,
                values.teacher_logsumexp,
                values.divergence,
                by_divergence,
                self.student.temperature,
                into_teacher=has_others,
            )
        if has_others:
            if by_logprob is None:
                by_logprob = torch.zeros_like(values.logprobs)
            self.student.capped_gradient_(
                logits, rows, values.logsumexp, values.entropy, by_logprob, by_entropy
            )
            if by_divergence is not None:
                logits.add_(teacher_logits)
        if slope is not None:
            logits.mul_(slope)


class _LinearDivergences(torch.autograd.Function):
    """Saves the student's weight as the parameter itself, as ``_LinearLogprobs`` does."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        pair = _Pair.of(*arguments)
        values = _Values.empty(pair.student.hidden)
        for rows, logits, teacher_logits in pair.chunks():
            values.write(rows, pair.values(rows, logits, teacher_logits))
        ctx.save_for_backward(*arguments[:4], *arguments[6:9], *values)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.caps = arguments[4:6], arguments[9:]
        return values.logprobs, values.entropy, values.divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        pair = _Pair.of(*saved[:4], *ctx.settings, *saved[4:7], *ctx.caps)
        values = _Values(*saved[7:])
        gradients = ProjectionGradients(pair.student, ctx.needs_input_grad)
        for rows, logits, teacher_logits in pair.chunks():
            by_value = [None if grad is None else grad[rows] for grad in grads]
            pair.gradient_(rows, logits, teacher_logits, values.at(rows), by_value)
            gradients.add(logits, rows)
        return (*gradients.rounded(), *[None] * 8)


class _LinearDivergenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token_loss: DivergenceLoss, grad_enabled: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needed = [grad_enabled and each for each in ctx.needs_input_grad[2:5]]
        pair = _Pair.of(*arguments)
        gradients = ProjectionGradients(pair.student, needed)
        outputs = _Values.empty(pair.student.hidden)[:3]
        loss_sum = outputs[0].new_zeros(())
        for rows, logits, teacher_logits in pair.chunks():
            values = pair.values(rows, logits, teacher_logits)
            found = values.logprobs, values.entropy, values.divergence
            for output, own in zip(outputs, found, strict=True):
                output[rows] = own
            if not any(needed):
                loss_sum += checked(token_loss(*found[:2], rows, found[2]), rows).sum()
                continue
            chunk_sum, by_value = differentiate(token_loss, found, rows)
            loss_sum += chunk_sum
            pair.gradient_(rows, logits, teacher_logits, values, by_value)
            gradients.add(logits, rows)
        ctx.mark_non_differentiable(*outputs)
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return loss_sum, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_divergences went backward before and gave its gradient away")
        gradients, ctx.gradients = ctx.gradients, None
        if grad_sum is None:
            return (None,) * 13
        gradients.scale_(grad_sum)
        return (None, None, *gradients.rounded(), *[None] * 8)
