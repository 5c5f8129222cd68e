"""REINFORCE++: advantages normalised over the whole batch (Hu et al. 2025, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from easyrl.recipes.episode_gae import episode_advantages, tree_of
from easyrl.recipes.estimators import kl_of_log_ratio, merged_moments, moments, normalised
from easyrl.recipes.recipe import AdvantageInputs, Advantages, Models, RunSettings, Scope
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
    when the last response is there.

    ``kl_in_reward_coef`` beta is the paper's KL reward of each token: what is normalised is then

    .. math::
        r_i - \beta \sum_{u \ge t}
            \log \frac{\pi_{old}(o_{i,u})}{\pi_{ref}(o_{i,u})}

    at each trained token t, u over the trained ones, with the mean and deviation of these.
    ``pi_old`` is what the endpoint sampled the token with; the difference of logarithms is k1, in
    place of which ``kl_in_reward_estimator`` may have k2 or k3.
    """

    kl_in_advantages: ClassVar[bool] = True

    @property
    def before_advantages(self) -> Models:
        return Models(reference=self.kl_in_reward_coef > 0)

    @property
    def scope(self) -> Scope:
        return "batch"

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

    def batch_statistics(
        self, group: RolloutGroup, run: RunSettings, inputs: AdvantageInputs
    ) -> np.ndarray:
        """With a KL in the reward float64 [3], ``moments`` of what the group's trained tokens have
        before it is normalised.
        """
        if self.kl_in_reward_coef == 0:
            return self.batch_rewards(group, run)
        raw = self._of_tokens(group, 0, run, inputs)
        chosen = sorted(self.select(group, run))
        tokens = [raw[i][self.trained_tokens(group.completions[i], run)] for i in chosen]
        return moments(np.concatenate([np.zeros(0), *tokens]))

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        if self.kl_in_reward_coef > 0:
            num, mean, squares = merged_moments(inputs.rewards)
            deviation = np.sqrt(squares / max(num, 1)) + EPS
            raw = [self._of_tokens(g, i, run, inputs) for i, g in enumerate(groups)]
            return [[(own - mean) / deviation for own in group] for group in raw]
        values, num_tokens = np.concatenate(inputs.rewards).astype(np.float64).T
        return [normalised(self.baselined(g, run), values, num_tokens, EPS) for g in groups]

    def _of_tokens(
        self, group: RolloutGroup, place: int, run: RunSettings, inputs: AdvantageInputs
    ) -> list[np.ndarray]:
        """G arrays float64 [R] of the group at ``place`` of ``inputs``: at each trained token the
        reward less the KL from there on, of an episode in the branches that it is in, a mean over
        these; zero elsewhere.
        """
        made = []
        for i, (completion, reward) in enumerate(
            zip(group.completions, self.baselined(group, run), strict=True)
        ):
            tokens = self.trained_tokens(completion, run)
            reference = inputs.reference_logprobs[place][i][tokens].astype(np.float64)
            log_ratio = torch.from_numpy(completion.logprobs[tokens] - reference)
            kl = kl_of_log_ratio(log_ratio, self.kl_in_reward_estimator).numpy()
            own = np.zeros(len(tokens))
            if completion.episode is None:
                own[tokens] = reward - self.kl_in_reward_coef * kl[::-1].cumsum()[::-1]
            else:  # rewards to go along each branch
                penalties, tree = -self.kl_in_reward_coef * kl, tree_of(completion.episode, tokens)
                no_values = np.zeros(len(kl))
                own[tokens] = episode_advantages(penalties, no_values, reward, tree, 1.0, 1.0)
            made.append(own)
        return made
