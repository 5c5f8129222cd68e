"""On-policy distillation: reverse KL to a teacher (GKD, Agarwal et al. 2023, arXiv 2306.13649)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from easyrl.config.base import FilePath
from easyrl.recipes.aggregated import Aggregated
from easyrl.recipes.estimators import reward_to_go
from easyrl.recipes.recipe import (
    AdvantageInputs,
    Advantages,
    Models,
    RunSettings,
    Span,
    Teacher,
    Terms,
)
from easyrl.schema import RolloutGroup


@dataclass(frozen=True)
class Distillation(Aggregated):
    r"""The policy's own samples, and at each of their tokens its reverse KL to a frozen teacher.

    .. math::
        L = \frac{1}{\sum_i |o_i|} \sum_i \sum_t \begin{cases}
            \rho_{i,t}\, \mathrm{sg}\big[\log \pi(o_{i,t}) - \log \pi_T(o_{i,t})\big]
                & \text{sampled} \\
            \sum_v \pi(v) \big[\log \pi(v) - \log \pi_T(v)\big] & \text{full}
        \end{cases}, \quad \rho = \pi / \pi_{old}

    What the gradient is, by ``credit``; k is the log-ratio of a token, KL its mean over the
    vocabulary, both given the tokens before it, sg the stop-gradient:

    - ``token``: of each position's KL, the tokens before it taken as they are. That is GKD's with
      its student's samples, where nothing goes through the sampling distribution (its section 3).
      ``full`` has this gradient itself; ``sampled`` is its unbiased one-sample estimate, the policy
      gradient with the reward -k and a discount of 0, as in "On-Policy Distillation" (Thinking
      Machines, 2025). Differentiating k itself would not do: its expected gradient is zero.
    - ``sequence``: of the KL of whole responses, in which a token is credited with those after it
      too: ``sampled`` has the sum of k from the token on in place of k, ``full`` adds the sum of
      the KL behind the token, as a reward of it. MiniLLM (arXiv 2306.08543) splits its gradient so;
      its length normalisation and teacher-mixed sampling are not here. Couples a response's tokens.

    Both distributions are at ``rollout.temperature``. In later updates of a batch rho corrects a
    token's own probability, not that of the tokens before it, and nothing is clipped. Rewards have
    no effect and are only logged; a run needs none, and no second response of a prompt. Of the
    publications the two arXiv numbers, GKD's statement on sampling and the blog's discount were
    checked in quotations; section numbers were not.
    """

    teacher: FilePath | None = None  # required: a folder in Hugging Face's layout
    divergence: Literal["sampled", "full"] = "sampled"
    credit: Literal["token", "sequence"] = "token"

    uses_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> Models:
        is_full = self.divergence == "full"
        return Models(
            old_policy=not is_full or self.credit == "sequence",
            teacher=None if self.teacher is None else Teacher(self.teacher, full=is_full),
        )

    @property
    def span(self) -> Span:
        return "token" if self.credit == "token" else "sequence"

    def problems(self) -> list[str]:
        if self.teacher is None:
            return ["teacher: is required; give the folder of the teacher's model"]
        return []

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        """Zeros: what a token is worth is said by the teacher, in the loss."""
        return [np.zeros(len(group.completions)) for group in groups]

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        ratio = torch.exp(logprobs - terms.old_logprobs)
        costs = self._costs(logprobs, terms)
        if self.divergence == "sampled":
            if self.credit == "sequence":
                costs = reward_to_go(costs, terms.sequence_index)
            return terms.loss_weights * ratio * costs
        losses = terms.teacher_kl
        assert losses is not None
        if self.credit == "sequence":
            losses = losses + ratio * (reward_to_go(costs, terms.sequence_index) - costs)
        return terms.loss_weights * losses

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Mean reverse KL to the teacher: exact for ``full``, else its estimate, mean of k."""
        return {"teacher_kl_sum": self._costs(logprobs, terms).sum()}

    def _costs(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """[n], without gradient: each position's KL, or k of its token."""
        if self.divergence == "full":
            assert terms.teacher_kl is not None
            return terms.teacher_kl.detach()
        assert terms.teacher_logprobs is not None
        return logprobs.detach() - terms.teacher_logprobs
