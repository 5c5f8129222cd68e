"""A recipe's loss of a micro-batch, as a sum over its trained tokens, and what is counted of it.

Nothing here is a mean: one late scalar per optimizer step divides (docs/recipes.md), so that the
gradient does not depend on how a batch's groups are spread over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from easyrl.engines.base import LogprobComparison, MetricSums, ResponseDifference, TriLogprobs
from easyrl.kernels.logprobs.token_losses import RowLoss
from easyrl.recipes.recipe import Recipe, Terms
from easyrl.schema import FrozenLogprobs, MicroBatch, SampleKey

NUM_FIRST_TOKENS = 4  # of a response, that a different prompt hits most
ABSOLUTE = [each.name for each in fields(LogprobComparison)].index("abs")


def policy_loss(
    tri: TriLogprobs, micro_batch: MicroBatch, recipe: Recipe
) -> tuple[Tensor, MetricSums]:
    """Sum of ``recipe.loss`` over the N trained tokens; all tensors are on one device.

    Returns:
        The loss sum (scalar, carries the policy's gradient) and its metrics, summed over tokens.
    """
    policy, entropy = tri.logprobs, tri.entropy
    terms = terms_of(micro_batch, tri.frozen, policy, teacher_kl=tri.teacher_kl)
    if micro_batch.is_dummy:
        return _nothing(policy, entropy, terms, recipe), MetricSums()
    loss_sum = recipe.loss(policy, entropy, terms).sum()
    return loss_sum, loss_metrics(tri, micro_batch, recipe, loss_sum)


def token_loss(micro_batch: MicroBatch, frozen: FrozenLogprobs, recipe: Recipe) -> RowLoss:
    """The same in parts, for a projection that forms its gradient with its values.

    Only for a recipe of span ``token``.
    """
    assert recipe.span == "token"

    def losses(
        policy: Tensor, entropy: Tensor, rows: slice, teacher_kl: Tensor | None = None, /
    ) -> Tensor:
        if micro_batch.is_dummy:
            return policy * 0.0
        terms = terms_of(micro_batch, frozen, policy, rows, teacher_kl=teacher_kl)
        return recipe.loss(policy, entropy, terms)

    return losses


@torch.no_grad()
def loss_metrics(
    tri: TriLogprobs, micro_batch: MicroBatch, recipe: Recipe, loss_sum: Tensor
) -> MetricSums:
    """Sums over the N trained tokens: of every recipe, ``recipe.metrics``, and by endpoint."""
    if micro_batch.is_dummy:
        return MetricSums()
    policy, entropy = tri.logprobs.detach(), tri.entropy.detach()
    teacher_kl = None if tri.teacher_kl is None else tri.teacher_kl.detach()
    terms = terms_of(micro_batch, tri.frozen, policy, teacher_kl=teacher_kl)
    inference = terms.inference_logprobs
    counted = {"loss_sum": loss_sum, "entropy_sum": entropy.sum()}
    if micro_batch.is_sampled:
        difference = policy - inference
        counted["logprob_diff_sum"] = difference.abs().sum()
        # the inference server sampled, so the estimate is of KL(inference || trainer)
        counted["inference_kl_sum"] = (torch.exp(difference) - 1 - difference).sum()
        if len(policy):
            counted["logprob_diff_max"] = difference.abs().max()
    counted |= recipe.metrics(policy, entropy, terms)
    values = torch.stack([value.double() for value in counted.values()])
    endpoints: list[str] = []
    if tri.sampling_policy is not None and micro_batch.is_sampled:
        trainer = tri.sampling_policy.detach()
        endpoints, compared = comparison_sums(trainer, entropy, inference, micro_batch)
        difference = trainer - inference
        of_responses = response_sums(difference, micro_batch)
        by_response = difference[torch.argsort(micro_batch.sequence_index, stable=True)]
        parts = [values, compared, of_responses, by_response]
        values = torch.cat([part.double().flatten() for part in parts])
    numbers = values.tolist()  # in one transfer from the device
    num_counted, num_fields = len(counted), len(fields(LogprobComparison))
    sums = dict(zip(counted, numbers[:num_counted], strict=True))
    maxima = {name: sums.pop(name) for name in counted if name.endswith("_max")}
    sums["num_loss_tokens"] = float(micro_batch.num_loss_tokens)
    sums["num_sequences"] = float(len(terms.sequences))
    end = num_counted + len(endpoints) * num_fields
    starts = range(num_counted, end, num_fields)
    comparisons = {
        url: LogprobComparison(*numbers[start : start + num_fields])
        for url, start in zip(endpoints, starts, strict=True)
    }
    return MetricSums(sums, maxima, comparisons, _of_responses(numbers[end:], micro_batch))


def comparison_sums(
    trainer: Tensor, entropy: Tensor, inference: Tensor, micro_batch: MicroBatch
) -> tuple[list[str], Tensor]:
    """What ``metrics/logprob_mismatch.py`` and ``logprob_agreement.py`` judge of a micro-batch.

    Args:
        trainer, inference: log-probabilities [N] of its trained tokens, of the same dtype
        entropy: [N], nats, of the trainer's distribution
    Returns:
        the E endpoints that sampled them, sorted; [E, fields of ``LogprobComparison``]
    """
    sequence_index = micro_batch.sequence_index
    d = trainer - inference
    first = d.new_ones(len(d))
    later = sequence_index[NUM_FIRST_TOKENS:] == sequence_index[:-NUM_FIRST_TOKENS]
    first[NUM_FIRST_TOKENS:] = (~later).to(first)
    sums = {
        "num": torch.ones_like(d),
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
        "zeros": ((inference == 0) & (trainer < -1e-3)).to(d),
        "first": first,
        "first_abs": first * d.abs(),
    }
    per_token = torch.stack([sums[each.name] for each in fields(LogprobComparison)[:-1]])
    endpoints = sorted(set(micro_batch.endpoints))
    number = {url: e for e, url in enumerate(endpoints)}
    of_sequence = torch.tensor([number[url] for url in micro_batch.endpoints], device=d.device)
    rows = []
    for e in range(len(endpoints)):
        # torch.where, not a product: what is not finite stays with the endpoint that sent it
        own = torch.where(of_sequence[sequence_index] == e, per_token, 0.0)
        largest = own[ABSOLUTE].max() if len(d) else d.new_zeros(())
        rows.append(torch.cat([own.sum(dim=1), largest[None]]))
    return endpoints, torch.stack(rows)


def response_sums(difference: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Of each of the Q responses its number of trained tokens, and the sum of ``difference`` [N]
    over them; float64 [Q, 2]."""
    own = torch.stack([torch.ones_like(difference), difference], dim=1).double()
    sums = own.new_zeros(micro_batch.num_sequences, 2)
    return sums.index_add_(0, micro_batch.sequence_index, own)


def _of_responses(numbers: Sequence[float], micro_batch: MicroBatch) -> list[ResponseDifference]:
    """``numbers``: ``response_sums``, then each token's difference, by response; empty: of none."""
    if not numbers:
        return []
    start, found = 2 * micro_batch.num_sequences, []
    for sequence, key in enumerate(micro_batch.sequences):
        num, d = numbers[2 * sequence : 2 * sequence + 2]
        end = start + int(num)
        found.append(ResponseDifference(key, num, d, tuple(numbers[start:end])))
        start = end
    return found


def terms_of(
    micro_batch: MicroBatch,
    frozen: FrozenLogprobs,
    logprobs: Tensor,
    rows: slice = slice(None),
    *,
    teacher_kl: Tensor | None = None,
) -> Terms:
    """The terms of those ``rows`` of the N tokens of which the policy says ``logprobs``, and which
    have the divergence ``teacher_kl`` from a teacher."""
    policy = logprobs.detach()
    index, sequences = _whole_episodes(micro_batch)
    old, reference, teacher = frozen.old_policy, frozen.reference, frozen.teacher
    return Terms(
        advantages=micro_batch.advantages[rows].to(policy),
        loss_weights=micro_batch.loss_weights[rows].to(policy),
        inference_logprobs=micro_batch.inference_logprobs[rows].to(policy),
        old_logprobs=policy if old is None else old[rows],
        reference_logprobs=None if reference is None else reference[rows],
        sequence_index=index[rows],
        sequences=sequences,
        teacher_logprobs=None if teacher is None else teacher[rows],
        teacher_kl=teacher_kl,
    )


def _whole_episodes(micro_batch: MicroBatch) -> tuple[Tensor, tuple[SampleKey, ...]]:
    """Sequences as a recipe counts them, and which one each of the N tokens belongs to.

    The parts of an episode, which stand one after another, are one.
    """
    keys = micro_batch.sequences
    whole: dict[SampleKey, int] = {}
    number = [whole.setdefault(key._replace(part=0), len(whole)) for key in keys]
    if len(whole) == len(keys):
        return micro_batch.sequence_index, keys
    index = micro_batch.sequence_index
    return torch.tensor(number, device=index.device)[index], tuple(whole)


def _nothing(policy: Tensor, entropy: Tensor, terms: Terms, recipe: Recipe) -> Tensor:
    """A zero through the outputs that the recipe's loss uses: ZeRO-3 compares the ranks' paths
    backward."""
    outputs = [policy, entropy] + ([] if terms.teacher_kl is None else [terms.teacher_kl])
    with torch.enable_grad():
        leaves = [output.detach().requires_grad_() for output in outputs]
        terms = replace(terms, teacher_kl=leaves[2] if len(leaves) > 2 else None)
        loss_sum = recipe.loss(leaves[0], leaves[1], terms).sum()
        gradients = torch.autograd.grad(loss_sum, leaves, allow_unused=True)
    pairs = zip(outputs, gradients, strict=True)
    used = [output for output, gradient in pairs if gradient is not None]
    return torch.stack([output.sum() * 0.0 for output in used]).sum()
