"""A recipe's loss of a micro-batch, as a sum over its trained tokens, and what is counted of it.

Nothing here is a mean: one late scalar per optimizer step divides (docs/recipes.md), so that the
gradient does not depend on how a batch's groups are spread over micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums, TriLogprobs
from easyrl.kernels.logprobs.linear_logprob import TokenLoss
from easyrl.recipes.recipe import Recipe, Terms
from easyrl.schema import FrozenLogprobs, MicroBatch

NUM_FIRST_TOKENS = 4  # of a response, that a different prompt hits most


def policy_loss(
    tri: TriLogprobs, micro_batch: MicroBatch, recipe: Recipe
) -> tuple[Tensor, MetricSums]:
    """Sum of ``recipe.loss`` over the N trained tokens; all tensors are on one device.

    Returns:
        The loss sum (scalar, carries the policy's gradient) and its metrics, summed over tokens.
    """
    policy, entropy = tri.logprobs, tri.entropy
    terms = terms_of(micro_batch, tri.frozen, policy)
    if micro_batch.is_dummy:
        return _nothing(policy, entropy, terms, recipe), MetricSums()
    loss_sum = recipe.loss(policy, entropy, terms).sum()
    return loss_sum, loss_metrics(tri, micro_batch, recipe, loss_sum)


def token_loss(micro_batch: MicroBatch, frozen: FrozenLogprobs, recipe: Recipe) -> TokenLoss:
    """The same in parts, for a projection that forms its gradient with its values.

    Only for a recipe of span ``token``.
    """
    assert recipe.span == "token"

    def losses(policy: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        if micro_batch.is_dummy:
            return policy * 0.0
        return recipe.loss(policy, entropy, terms_of(micro_batch, frozen, policy, rows))

    return losses


@torch.no_grad()
def loss_metrics(
    tri: TriLogprobs, micro_batch: MicroBatch, recipe: Recipe, loss_sum: Tensor
) -> MetricSums:
    """Sums over the N trained tokens: of every recipe, and ``recipe.metrics``."""
    if micro_batch.is_dummy:
        return MetricSums()
    policy, entropy = tri.logprobs.detach(), tri.entropy.detach()
    terms = terms_of(micro_batch, tri.frozen, policy)
    inference = terms.inference_logprobs
    difference = policy - inference
    counted = {
        "loss_sum": loss_sum,
        "entropy_sum": entropy.sum(),
        "logprob_diff_sum": difference.abs().sum(),
        # the inference server sampled, so the estimate is of KL(inference || trainer)
        "inference_kl_sum": (torch.exp(difference) - 1 - difference).sum(),
    }
    if len(policy):
        counted["logprob_diff_max"] = difference.abs().max()
    counted |= comparison_sums(policy, entropy, inference, micro_batch.sequence_index)
    counted |= recipe.metrics(policy, entropy, terms)
    # in one transfer from the device
    numbers = torch.stack([value.double() for value in counted.values()]).tolist()
    sums = dict(zip(counted, numbers, strict=True))
    maxima = {name: sums.pop(name) for name in counted if name.endswith("_max")}
    sums["num_loss_tokens"] = float(micro_batch.num_loss_tokens)
    sums["num_sequences"] = float(micro_batch.num_sequences)
    return MetricSums(sums, maxima)


def comparison_sums(
    trainer: Tensor, entropy: Tensor, inference: Tensor, sequence_index: Tensor
) -> dict[str, Tensor]:
    """What ``metrics/logprob_mismatch.py`` judges of the N trained tokens of a micro-batch.

    Args:
        trainer, inference: log-probabilities [N], of the same dtype
        entropy: [N], nats, of the trainer's distribution
        sequence_index: int64 [N], tokens of a sequence are adjacent
    Returns:
        scalars; the names begin with ``agreement/``
    """
    d = trainer - inference
    first = d.new_ones(len(d))
    later = sequence_index[NUM_FIRST_TOKENS:] == sequence_index[:-NUM_FIRST_TOKENS]
    first[NUM_FIRST_TOKENS:] = (~later).to(first)
    sums = {
        "y": trainer,
        "h": entropy,
        "d": d,
        "yy": trainer * trainer,
        "yh": trainer * entropy,
        "hh": entropy * entropy,
        "yd": trainer * d,
        "hd": entropy * d,
        "dd": d * d,
        "abs": d.abs(),
        "positive": d.clamp(min=0).square(),
        "zeros": (inference == 0) & (trainer < -1e-3),
        "first": first,
        "first_abs": first * d.abs(),
    }
    return {"agreement/num": d.new_tensor(len(d))} | {
        f"agreement/{name}": value.sum() for name, value in sums.items()
    }


def terms_of(
    micro_batch: MicroBatch, frozen: FrozenLogprobs, logprobs: Tensor, rows: slice = slice(None)
) -> Terms:
    """The terms of those ``rows`` of the N tokens of which the policy says ``logprobs``."""
    policy = logprobs.detach()
    old, reference = frozen.old_policy, frozen.reference
    return Terms(
        advantages=micro_batch.advantages[rows].to(policy),
        loss_weights=micro_batch.loss_weights[rows].to(policy),
        inference_logprobs=micro_batch.inference_logprobs[rows].to(policy),
        old_logprobs=policy if old is None else old[rows],
        reference_logprobs=None if reference is None else reference[rows],
        sequence_index=micro_batch.sequence_index[rows],
        sequences=micro_batch.sequences,
    )


def _nothing(policy: Tensor, entropy: Tensor, terms: Terms, recipe: Recipe) -> Tensor:
    """A zero through the outputs that the recipe's loss uses: ZeRO-3 compares the ranks' paths
    backward."""
    with torch.enable_grad():
        leaves = policy.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss_sum = recipe.loss(*leaves, terms).sum()
        gradients = torch.autograd.grad(loss_sum, leaves, allow_unused=True)
    outputs = zip((policy, entropy), gradients, strict=True)
    used = [output for output, gradient in outputs if gradient is not None]
    return torch.stack([output.sum() * 0.0 for output in used]).sum()
