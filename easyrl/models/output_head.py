"""The projection of hidden states to the vocabulary, as log-probabilities of labels.

What models do to logits behind the product is honoured: a factor (Cohere, Granite, Falcon-H1) and a
soft cap (Gemma 2, arXiv:2408.00118, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from easyrl.kernels.logprobs.chunk_size import default_chunk_size
from easyrl.kernels.logprobs.linear_divergence import TeacherRows, linear_divergences
from easyrl.kernels.logprobs.linear_logprob import linear_logprobs
from easyrl.kernels.logprobs.token_losses import RowLoss

_FACTORS = ("logit_scale", "lm_head_multiplier")  # in config.json
_DIVISOR = "logits_scaling"


@dataclass(frozen=True, slots=True)
class LogitShape:
    """Logits are ``cap · tanh(scale · x / cap)`` of the product x; without a cap ``scale · x``."""

    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitShape:
        """As ``config.json`` says it; that it is all, the comparison at load shows."""
        values = config.get_text_config().to_dict()
        scale = 1.0
        for name in _FACTORS:
            if isinstance(factor := values.get(name), int | float):
                scale *= factor
        if divisor := values.get(_DIVISOR):
            scale /= divisor
        return cls(float(scale), values.get("final_logit_softcapping") or None)

    def teacher_rows(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> TeacherRows:
        """Of a teacher with such logits: ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V]."""
        if self.scale == 1.0:
            return TeacherRows(hidden, weight, bias, self.soft_cap)
        bias = None if bias is None else bias * self.scale
        return TeacherRows(hidden * self.scale, weight, bias, self.soft_cap)


class LogprobHead(nn.Module):
    """The output projection as log-probabilities of labels.

    A module of its own, because ZeRO-3 gathers a weight around the forward of the module that owns
    it. It takes over the projection's parameters, so a tied weight stays one object.
    """

    def __init__(
        self, projection: nn.Linear, chunk_size: int | None, logits: LogitShape | None = None
    ) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias: nn.Parameter | None = projection.bias
        self.chunk_size = chunk_size
        self.logits = logits or LogitShape()

    def forward(
        self,
        hidden: Tensor,
        label_ids: Tensor,
        temperature: float,
        token_loss: RowLoss | None = None,
        teacher: TeacherRows | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies, float32 [N]; ``hidden`` [N, H], ``label_ids`` [N].

        With a ``teacher`` the divergences from it come behind them. With ``token_loss`` the sum of
        its losses comes before them, and alone carries gradient.
        """
        scale, soft_cap = self.logits.scale, self.logits.soft_cap
        settings: dict[str, Any] = {
            "bias": self.bias,
            # The factor goes into the temperature, and so costs nothing.
            "temperature": temperature / scale,
            "chunk_size": self.chunk_size or default_chunk_size(hidden, len(self.weight)),
            "soft_cap": None if soft_cap is None else soft_cap / scale,
        }
        if teacher is None:
            return linear_logprobs(hidden, self.weight, label_ids, token_loss, **settings)
        if scale != 1.0:
            teacher = teacher.divided(scale)
        return linear_divergences(hidden, self.weight, label_ids, teacher, token_loss, **settings)


class NoProjection(nn.Module):
    """Takes the place of a ``LogprobHead``: the hidden states as they are."""

    def forward(self, hidden: Tensor, *_: object) -> tuple[Tensor]:
        return (hidden,)


def plain_logprobs(logits: Tensor, label_ids: Tensor, temperature: float) -> Tensor:
    """[N] of labels [N] by whole logits [N, V]: what ``LogprobHead`` is compared with."""
    logp = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(
        -1
    )
    return logp.gather(1, label_ids[:, None]).squeeze(1)
