"""A recipe's value loss of a micro-batch, as a sum over its trained tokens, and what is counted."""

from __future__ import annotations

import torch
from torch import Tensor

from easyrl.engines.base import MetricSums
from easyrl.recipes.recipe import Recipe, ValueTerms
from easyrl.schema import MicroBatch


def value_loss(
    values: Tensor, micro_batch: MicroBatch, recipe: Recipe
) -> tuple[Tensor, MetricSums]:
    """Sum of ``recipe.value_loss`` over the N trained tokens; all tensors are on one device.

    ``values`` [N] are the critic's and carry gradient; the row has returns, and what the critic
    said of it as the batch began. Of a dummy the sum is a zero that carries gradient.
    """
    if micro_batch.is_dummy:
        return values.sum() * 0.0, MetricSums()
    frozen = micro_batch.frozen
    assert micro_batch.returns is not None and frozen is not None and frozen.values is not None
    terms = ValueTerms(micro_batch.returns.to(values), frozen.values.to(values))
    loss_sum = recipe.value_loss(values, terms).sum()
    return loss_sum, _value_metrics(values.detach(), terms, recipe, loss_sum.detach())


@torch.no_grad()
def _value_metrics(
    values: Tensor, terms: ValueTerms, recipe: Recipe, loss_sum: Tensor
) -> MetricSums:
    """Sums that ``metrics/critic_metrics.py`` divides: moments of returns and errors."""
    returns = terms.returns.double()
    errors = returns - values.double()
    counted = {
        "loss": loss_sum,
        "value": values.sum(),
        "return": returns.sum(),
        "return_square": returns.square().sum(),
        "error": errors.sum(),
        "error_square": errors.square().sum(),
    }
    counted |= {f"of_recipe/{n}": v for n, v in recipe.value_metrics(values, terms).items()}
    numbers = torch.stack([value.double() for value in counted.values()]).tolist()
    sums = {f"critic/{name}": n for name, n in zip(counted, numbers, strict=True)}
    return MetricSums(sums | {"critic/num": float(len(values))})
