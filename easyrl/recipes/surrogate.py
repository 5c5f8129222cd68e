"""The clipped surrogate of PPO per token, and the terms that GRPO and its relatives add to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from easyrl.recipes.aggregated import Aggregated
from easyrl.recipes.dynamic_sampling import DynamicSampling
from easyrl.recipes.entropy_control import COEF, applied_coefficient, next_entropy_controls
from easyrl.recipes.estimators import (
    KLEstimator,
    clipped_surrogate,
    importance_ratio,
    importance_weights,
    is_inside,
    kl_estimate,
    reward_to_go,
)
from easyrl.recipes.recipe import Models, RunSettings, Span, Terms
from easyrl.schema import Completion, RolloutGroup


def no_k1(value: object) -> object:
    """For a field's validator. Raises ``ValueError`` for ``k1``."""
    if value == "k1":
        raise ValueError("k1 has a zero expected gradient as a loss; use k3 or k2")
    return value


@dataclass(frozen=True)
class ClippedSurrogate(DynamicSampling, Aggregated):
    r"""A sum over tokens of PPO's clipped surrogate (Schulman et al. 2017, eq. 7), with KL, entropy
    and importance correction.

    .. math::
        L = -\sum_{i,t} w_{i,t} \big[ \min(\rho_{i,t} A_{i,t},
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_{i,t})
            - \beta\, \mathrm{KL} + \alpha H \big] \Big/ \text{denominator}, \quad
        \rho = \pi / \pi_{old}

    A subclass says what the advantages are, and may have another ``ratio`` or ``surrogate``.
    """

    clip_eps_low: PositiveFloat = 0.2
    clip_eps_high: PositiveFloat = 0.2  # DAPO §3.1 has it larger than the lower one
    kl_coef: NonNegativeFloat = 0.0  # of the KL to the reference in the loss; 0: without one
    kl_estimator: Annotated[Literal["k3", "k2"], BeforeValidator(no_k1)] = "k3"
    kl_in_reward_coef: NonNegativeFloat = 0.0  # of the KL as a reward of each token (PPO's way)
    kl_in_reward_estimator: KLEstimator = "k1"  # of that one
    entropy_coef: float = 0.0  # of the bonus; with a target where its control begins
    entropy_target: PositiveFloat | None = None  # nats; null: the coefficient stays as it is
    entropy_coef_step: PositiveFloat = 0.005  # that the control changes it by in each step
    entropy_coef_max: PositiveFloat = 1.0  # that the control takes it to at most
    importance_correction: Literal["none", "truncated", "masked"] = "none"  # of the trainer's over
    # the inference engine's probability: TIS caps the ratio, masked IS drops tokens outside
    importance_cap: Annotated[float, Field(gt=1)] = 2.0  # masked also drops below 1 / cap
    # A response cut off at max_tokens is not trained, though its reward counts in the baseline
    # (overlong filtering: DAPO, arXiv 2503.14476, §3.4).
    mask_truncated: bool = False

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_eps_low", "clip_eps_high")

    # whether a KL in the reward is in the advantages already, so that the loss does not add it
    kl_in_advantages: ClassVar[bool] = False

    @property
    def needs(self) -> Models:
        return Models(reference=self.kl_coef > 0 or self.kl_in_reward_coef > 0, old_policy=True)

    @property
    def span(self) -> Span:
        """A token is credited with the penalties of later ones where the KL is in the reward."""
        return "token" if self.kl_in_reward_coef == 0 or self.kl_in_advantages else "sequence"

    @property
    def advantage_only(self) -> bool:
        """Also False for a class that changes the loss: what it adds is not known."""
        cls = type(self)
        own_loss = cls.loss is ClippedSurrogate.loss
        own_loss = own_loss and cls._credited is ClippedSurrogate._credited
        has_bonus = self.entropy_coef != 0 or self.entropy_target is not None
        return own_loss and self.kl_coef == self.kl_in_reward_coef == 0 and not has_bonus

    def problems(self) -> list[str]:
        problems = super().problems()
        starts_inside = 0 <= self.entropy_coef <= self.entropy_coef_max
        if self.entropy_target is not None and not starts_inside:
            problems.append(
                f"entropy_coef: {self.entropy_coef} is where its control begins, which keeps it "
                f"between 0 and recipe.entropy_coef_max = {self.entropy_coef_max}; choose one there"
            )
        return problems

    def notices(self) -> list[str]:
        said = [
            f"{key}: has no effect without a target; remove it, or set recipe.entropy_target"
            for key in ("entropy_coef_step", "entropy_coef_max")
            if self.is_set(key) and self.entropy_target is None
        ]
        if self.is_set("importance_cap") and self.importance_correction == "none":
            said.append(
                "importance_cap: has no effect without a correction; remove it, or set "
                "recipe.importance_correction to truncated or masked"
            )
        if self.is_set("kl_estimator") and self.kl_coef == 0:
            said.append(
                "kl_estimator: has no effect without a KL term in the loss; remove it, or set "
                "recipe.kl_coef above 0"
            )
        if self.is_set("kl_in_reward_estimator") and self.kl_in_reward_coef == 0:
            said.append(
                "kl_in_reward_estimator: has no effect without a KL in the reward; remove it, or "
                "set recipe.kl_in_reward_coef above 0"
            )
        return said

    # ---- the entropy's control ----

    def initial_controls(self) -> dict[str, float]:
        return {} if self.entropy_target is None else {COEF: self.entropy_coef}

    def next_controls(
        self, controls: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        if self.entropy_target is None:
            return controls
        return next_entropy_controls(
            controls,
            measured["entropy"],
            target=self.entropy_target,
            step=self.entropy_coef_step,
            maximum=self.entropy_coef_max,
        )

    def controlled(self, controls: Mapping[str, float]) -> Self:
        if self.entropy_target is None:
            return self
        return replace(self, entropy_coef=applied_coefficient(controls, self.entropy_target))

    # ---- groups ----

    def rewards(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float32 [G], what the advantages are made of."""
        return group.rewards

    def weighted_rewards(
        self, group: RolloutGroup, run: RunSettings
    ) -> list[tuple[float, np.ndarray]]:
        """For advantages made of each reward by itself, its weight and float64 [G].

        Zero where one has no opinion, as in the sum; parts of a reward are none. Raises
        ``ValueError`` for a reward without a weight.
        """
        weighted = []
        names = dict.fromkeys(name for score in group.scores for name in score.components)
        for name in (name for name in names if "/" not in name):
            if name not in run.reward_weights:
                raise ValueError(f"reward {name!r} has no weight among {run.reward_weights}")
            values = np.array([s.components.get(name, 0.0) for s in group.scores], np.float64)
            weighted.append((run.reward_weights[name], values))
        return weighted

    def trained_tokens(self, completion: Completion, run: RunSettings) -> np.ndarray:
        if self.mask_truncated and completion.truncated:
            return np.zeros_like(completion.loss_mask)
        return completion.loss_mask

    # ---- tokens ----

    def ratio(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """[n] policy / old policy of the sampled token; carries gradient."""
        return torch.exp(logprobs - terms.old_logprobs)

    def surrogate(self, logprobs: Tensor, advantages: Tensor, terms: Terms) -> Tensor:
        """[n], what is maximised; zero and without gradient where ``advantages`` [n] are zero."""
        ratio = self.ratio(logprobs, terms)
        return clipped_surrogate(ratio, advantages, self.clip_eps_low, self.clip_eps_high)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """bool [n] each: tokens at which a bound acts, by the metric's name."""
        return {
            "clip_low": (advantages < 0) & (ratio < 1 - self.clip_eps_low),
            "clip_high": (advantages > 0) & (ratio > 1 + self.clip_eps_high),
        }

    def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
        losses = -self.surrogate(logprobs, self._credited(logprobs, terms), terms)
        if self.importance_correction != "none":
            ratio = importance_ratio(terms.old_logprobs, terms.inference_logprobs)
            losses = losses * importance_weights(
                ratio, self.importance_correction, self.importance_cap
            )
        if terms.reference_logprobs is not None and self.kl_coef > 0:
            kl = kl_estimate(logprobs, terms.reference_logprobs, self.kl_estimator)
            losses = losses + self.kl_coef * kl
        if self.entropy_coef != 0:
            losses = losses - self.entropy_coef * entropy
        return terms.loss_weights * losses

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Means of ratio, clipped shares, KL (k3) and importance ratio; the largest ratio."""
        ratio = self.ratio(logprobs, terms)
        advantages = self._credited(logprobs, terms)
        counted = {"ratio_sum": ratio.sum()}
        for name, clipped in self.clipped(ratio, advantages).items():
            counted[f"{name}_sum"] = clipped.sum()
        if self.importance_correction != "none":
            importance = importance_ratio(terms.old_logprobs, terms.inference_logprobs)
            counted["importance_ratio_sum"] = importance.sum()
            if self.importance_correction == "truncated":
                counted["importance_capped_sum"] = (importance > self.importance_cap).sum()
            else:
                outside = ~is_inside(importance, self.importance_cap)
                counted["importance_masked_sum"] = outside.sum()
        if terms.reference_logprobs is not None:
            counted["kl_sum"] = kl_estimate(logprobs, terms.reference_logprobs, "k3").sum()
        if self.entropy_target is not None:
            counted["entropy_coef_sum"] = ratio.new_tensor(self.entropy_coef * len(ratio))
        if len(ratio):
            counted["ratio_max"] = ratio.max()
        return counted

    def _credited(self, logprobs: Tensor, terms: Terms) -> Tensor:
        """Advantages [n], less the penalties on a token and all that follow it."""
        reference = terms.reference_logprobs
        if reference is None or self.kl_in_reward_coef == 0 or self.kl_in_advantages:
            return terms.advantages
        kl = kl_estimate(logprobs.detach(), reference, self.kl_in_reward_estimator)
        penalty = reward_to_go(kl, terms.sequence_index)
        return terms.advantages - self.kl_in_reward_coef * penalty
