"""REINFORCE++: advantages normalised over the whole batch (Hu et al. 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.recipes.estimators import normalised
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings, Scope
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.schema import RolloutGroup

EPS = 1e-8  # beside a deviation


@dataclass(frozen=True)
class ReinforcePP(ClippedSurrogate):
    r"""PPO's clipped surrogate without a critic: a response's reward, normalised over the batch.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min(\rho_{i,t} A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_i), \quad
        A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}

    Mean and deviation are over the trained tokens of all groups of the optimizer step and of all
    ranks, each with its response's reward, as in OpenRLHF, the authors' trainer. So training begins
    when the last response is there. The paper's KL reward of each token, which is normalised with
    the rest, needs the reference's log-probabilities before the advantages; the trainer has them
    with the policy's own forward, behind the advantages: ``kl_in_reward_coef`` is refused.
    """

    @property
    def scope(self) -> Scope:
        return "batch"

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.kl_in_reward_coef > 0:
            problems.append(
                "kl_in_reward_coef: the normalised reward would have to contain the KL, and the "
                "reference's log-probabilities come after the advantages; set recipe.kl_coef (the "
                "KL in the loss), or use a recipe that takes the KL into its rewards (rloo, grpo)"
            )
        return problems

    def batch_rewards(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float64 [G, 2]: ``baselined`` rewards, and how many tokens of each response train."""
        chosen = set(self.select(group, run))
        lengths = [
            self.trained_tokens(completion, run).sum() if sample in chosen else 0
            for sample, completion in enumerate(group.completions)
        ]
        return np.stack([self.baselined(group, run), np.array(lengths, dtype=np.float64)], axis=1)

    def baselined(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float64 [G], what is normalised over the batch."""
        return self.rewards(group, run).astype(np.float64)

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        values, num_tokens = np.concatenate(inputs.rewards).astype(np.float64).T
        return [normalised(self.baselined(g, run), values, num_tokens, EPS) for g in groups]
