"""The clipped policy-gradient loss of a micro-batch, as a sum over its trained tokens.

Nothing here is a mean: ``MicroBatch.loss_weights`` carries the aggregation (GRPO, DAPO, Dr. GRPO)
and one late scalar per optimizer step divides (DESIGN §2.4), so that the gradient of a batch does
not depend on how its groups are spread over micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.kernels.logprobs.linear_token_loss import TokenLoss
from easyrl.recipes.estimators import (
    importance_ratio,
    importance_weights,
    kl_estimate,
    reward_to_go,
)
from easyrl.recipes.loss_metrics import loss_metrics

if TYPE_CHECKING:
    from easyrl.config import ObjectiveConfig
    from easyrl.schema import FrozenLogprobs, MicroBatch


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What the losses of trained tokens are made of besides the policy's own; float32 [N]."""

    advantages: Tensor
    loss_weights: Tensor
    inference_logprobs: Tensor
    old_logprobs: Tensor | None  # None: the policy itself is the old policy
    reference_logprobs: Tensor | None  # None without a reference

    @classmethod
    def of(cls, micro_batch: MicroBatch, frozen: FrozenLogprobs) -> TokenTerms:
        return cls(
            advantages=micro_batch.advantages,
            loss_weights=micro_batch.loss_weights,
            inference_logprobs=micro_batch.inference_logprobs,
            old_logprobs=frozen.old_policy,
            reference_logprobs=frozen.reference,
        )

    def __getitem__(self, rows: slice) -> TokenTerms:
        old, reference = self.old_logprobs, self.reference_logprobs
        return TokenTerms(
            advantages=self.advantages[rows],
            loss_weights=self.loss_weights[rows],
            inference_logprobs=self.inference_logprobs[rows],
            old_logprobs=None if old is None else old[rows],
            reference_logprobs=None if reference is None else reference[rows],
        )


def is_sum_over_tokens(config: ObjectiveConfig) -> bool:
    """Whether a token's loss depends on that token alone, given what the frozen models say.

    With a KL penalty in the reward it does not: a token is credited with those of later ones.
    """
    return config.kl_in_reward_coef == 0


def policy_loss(
    tri: TriLogprobs, micro_batch: MicroBatch, config: ObjectiveConfig
) -> tuple[Tensor, MetricSums]:
    """Sum over the N trained tokens of ``token_losses``; all tensors are on one device.

    Returns:
        The loss sum (scalar, carries the policy's gradient) and its metrics, summed over tokens.
    """
    policy, entropy = tri.policy.logprobs, tri.policy.entropy
    if micro_batch.is_dummy:
        return _nothing(policy, entropy, config).sum(), MetricSums()
    terms = TokenTerms.of(micro_batch, tri.frozen)
    if terms.reference_logprobs is not None and config.kl_in_reward_coef != 0:
        k1 = policy.detach() - terms.reference_logprobs
        penalty = reward_to_go(k1, micro_batch.sequence_index)
        terms = replace(terms, advantages=terms.advantages - config.kl_in_reward_coef * penalty)
    loss_sum = token_losses(policy, entropy, terms, config).sum()
    return loss_sum, loss_metrics(tri, micro_batch, config, loss_sum, terms.advantages)


def token_loss(
    micro_batch: MicroBatch, frozen: FrozenLogprobs, config: ObjectiveConfig
) -> TokenLoss:
    """The same in parts, for a projection that forms its gradient with its values.

    Only for an objective that ``is_sum_over_tokens``.
    """
    assert is_sum_over_tokens(config)
    terms = TokenTerms.of(micro_batch, frozen)

    def losses(policy: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        if micro_batch.is_dummy:
            return _nothing(policy, entropy, config)
        return token_losses(policy, entropy, terms[rows], config)

    return losses


def token_losses(
    policy: Tensor, entropy: Tensor, terms: TokenTerms, config: ObjectiveConfig
) -> Tensor:
    """[N] ``loss_weights * per_token_loss``; ``policy`` and ``entropy`` [N] carry the gradient.

    Per token: ``-min(ratio A, clip(ratio, 1 - low, 1 + high) A) + kl_coef * KL - entropy_coef * H``
    with ``ratio = policy / old policy`` (DeepSeekMath eq. 3; separate clips: DAPO §3.1). With
    ``importance_correction`` the first term is multiplied by ``importance_weights``.
    """
    old = policy.detach() if terms.old_logprobs is None else terms.old_logprobs
    advantages = terms.advantages.to(policy)
    ratio = torch.exp(policy - old)
    clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if config.importance_correction != "none":
        per_token = per_token * importance_weights(
            importance_ratio(old, terms.inference_logprobs),
            config.importance_correction,
            config.importance_cap,
        )
    if terms.reference_logprobs is not None and config.kl_coef > 0:
        per_token = per_token + config.kl_coef * kl_estimate(
            policy, terms.reference_logprobs, config.kl_estimator
        )
    if config.entropy_coef != 0:
        per_token = per_token - config.entropy_coef * entropy
    return terms.loss_weights.to(policy) * per_token


def _nothing(policy: Tensor, entropy: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] losses of a dummy, through the same outputs as any other: ZeRO-3 compares the ranks'
    paths backward."""
    used = policy if config.entropy_coef == 0 else policy + entropy
    return used * 0.0
