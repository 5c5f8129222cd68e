"""PPO: Proximal Policy Optimization with a critic (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from easyrl.recipes.episode_gae import episode_advantages, tree_of
from easyrl.recipes.estimators import (
    generalised_advantages,
    kl_of_log_ratio,
    merged_moments,
    moments,
)
from easyrl.recipes.recipe import (
    AdvantageInputs,
    Advantages,
    Models,
    RunSettings,
    Scope,
    Span,
    Terms,
    ValueTerms,
)
from easyrl.recipes.surrogate import ClippedSurrogate
from easyrl.schema import RolloutGroup

EPS = 1e-8  # beside a variance, as in TRL


@dataclass(frozen=True)
class PPO(ClippedSurrogate):
    r"""PPO's clipped surrogate (eq. 7) on generalised advantages (arXiv 1506.02438, eq. 16).

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min(\rho_{i,t} A_{i,t},
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon, 1 + \epsilon) A_{i,t}), \quad
        A_{i,t} = \sum_l (\gamma \lambda)^l \delta_{i,t+l}, \quad
        \delta_{i,t} = r_{i,t} + \gamma V(s_{i,t+1}) - V(s_{i,t})

    and for the critic, a model of its own,

    .. math::
        L_V = \frac{c}{\sum_i |o_i|} \sum_i \sum_t \max\big((V - R)^2,
            (\mathrm{clip}(V, V_{old} - \epsilon_V, V_{old} + \epsilon_V) - R)^2\big), \quad
        R_{i,t} = A_{i,t} + V_{old}(s_{i,t})

    A response's reward is that of its last trained token, an episode's that of the last token of
    each branch (``episode_gae``); ``kl_in_reward_coef`` beta adds
    ``-beta (log pi_old - log pi_ref)`` to each token's, where ``log pi_old`` is what the endpoint
    sampled the token with (``kl_in_reward_estimator``: k2 or k3 in place of that difference, k1).
    Values are the critic's as the batch began, in all of the batch's updates. ``whiten`` makes the
    advantages' mean 0 and variance 1 over all trained tokens of the optimizer step, of all ranks,
    after R is made of them: training then begins when the last response is there; without it the
    run streams.

    The defaults are those of TRL's last PPO trainer for language models (gamma 1, lambda 0.95, both
    clips 0.2, whitened advantages, half a squared error), but for its KL of 0.05 in the reward,
    which is off here. The paper's own are of control tasks: gamma 0.99, lambda 0.95, epsilon 0.2.
    With one update per batch V is V_old, and ``value_clip`` cannot act.
    """

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    whiten: bool = True  # advantages normalised over the tokens of the optimizer step
    value_clip: PositiveFloat | None = 0.2  # epsilon_V; null: a plain squared error
    value_coef: PositiveFloat = 0.5  # c; the critic has an optimizer and a clip of its own

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_eps_low", "clip_eps_high", "value_clip")

    @property
    def needs(self) -> Models:
        return replace(super().needs, critic=True)

    @property
    def before_advantages(self) -> Models:
        return Models(critic=True, reference=self.kl_in_reward_coef > 0)

    @property
    def scope(self) -> Scope:
        return "batch" if self.whiten else "group"

    @property
    def span(self) -> Span:
        """The KL in the reward is in the advantages already."""
        return "token"

    @property
    def advantage_only(self) -> bool:
        """The critic learns from each group."""
        return False

    # ---- groups ----

    def batch_statistics(
        self, group: RolloutGroup, run: RunSettings, inputs: AdvantageInputs
    ) -> np.ndarray:
        """float64 [3], ``moments`` of the advantages of the group's trained tokens."""
        raw = self._raw_advantages(group, 0, run, inputs)
        chosen = sorted(self.select(group, run))
        tokens = [raw[i][self.trained_tokens(group.completions[i], run)] for i in chosen]
        return moments(np.concatenate([np.zeros(0), *tokens]))

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        raw = [self._raw_advantages(g, i, run, inputs) for i, g in enumerate(groups)]
        if not self.whiten:
            return raw
        num, mean, squares = merged_moments(inputs.rewards)
        deviation = np.sqrt(squares / max(num - 1, 1) + EPS)
        return [[(own - mean) / deviation for own in group] for group in raw]

    def returns(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Sequence[np.ndarray]]:
        made = []
        for i, group in enumerate(groups):
            raw = self._raw_advantages(group, i, run, inputs)
            made.append([a + v for a, v in zip(raw, inputs.values[i], strict=True)])
        return made

    def _raw_advantages(
        self, group: RolloutGroup, place: int, run: RunSettings, inputs: AdvantageInputs
    ) -> list[np.ndarray]:
        """G arrays float64 [R] of the group at ``place`` of ``inputs``; zero where not trained."""
        trained = [self.trained_tokens(c, run) for c in group.completions]
        outcomes = self.rewards(group, run)
        rewards = []
        for i, (completion, tokens) in enumerate(zip(group.completions, trained, strict=True)):
            own = np.zeros(tokens.sum())
            if len(own):
                if self.kl_in_reward_coef > 0:
                    reference = inputs.reference_logprobs[place][i][tokens].astype(np.float64)
                    log_ratio = torch.from_numpy(completion.logprobs[tokens] - reference)
                    kl = kl_of_log_ratio(log_ratio, self.kl_in_reward_estimator)
                    own -= self.kl_in_reward_coef * kl.numpy()
                if completion.episode is None:
                    own[-1] += outcomes[i]
            rewards.append(own)
        values = [v[t] for v, t in zip(inputs.values[place], trained, strict=True)]
        found = generalised_advantages(rewards, values, self.gamma, self.gae_lambda)
        for i, completion in enumerate(group.completions):
            if completion.episode is not None:
                tree = tree_of(completion.episode, trained[i])
                found[i] = episode_advantages(
                    rewards[i], values[i], float(outcomes[i]), tree, self.gamma, self.gae_lambda
                )
        advantages = [np.zeros(len(tokens)) for tokens in trained]
        for own, tokens, made in zip(advantages, trained, found, strict=True):
            own[tokens] = made
        return advantages

    # ---- tokens ----

    def value_loss(self, values: Tensor, terms: ValueTerms) -> Tensor:
        losses = (values - terms.returns).square()
        if self.value_clip is not None:
            losses = torch.maximum(losses, (self._clipped(values, terms) - terms.returns).square())
        return self.value_coef * losses

    def value_metrics(self, values: Tensor, terms: ValueTerms) -> dict[str, Tensor]:
        """Share of the tokens whose value is beyond the clip and without gradient."""
        if self.value_clip is None:
            return {}
        plain = (values - terms.returns).square()
        clipped = (self._clipped(values, terms) - terms.returns).square()
        return {"clip_fraction": (clipped > plain).sum()}

    def _clipped(self, values: Tensor, terms: ValueTerms) -> Tensor:
        assert self.value_clip is not None
        moved = (values - terms.old_values).clamp(-self.value_clip, self.value_clip)
        return terms.old_values + moved

    def _credited(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """The advantages: a KL in the reward has gone through GAE."""
        return terms.advantages
