"""What is reported of a critic: its loss, and how much of the returns' variance it explains."""

from __future__ import annotations

from collections.abc import Mapping

from easyrl.engines.base import StepResult

OF_RECIPE = "critic/of_recipe/"


def critic_metrics(
    sums: Mapping[str, float], value_denominator: float, step: StepResult | None
) -> dict[str, float]:
    """``critic/…`` of one update, made of the sums over all its micro-batches and ranks.

    ``critic/explained_variance`` is ``1 - Var(returns - values) / Var(returns)`` over the trained
    tokens: 1 for values that are the returns, 0 for a constant, below 0 for values that are worse.
    Empty without a critic.
    """
    num = sums.get("critic/num", 0.0)
    if num == 0:
        return {}
    returns = _variance(sums["critic/return"], sums["critic/return_square"], num)
    errors = _variance(sums["critic/error"], sums["critic/error_square"], num)
    metrics = {
        "critic/loss": sums["critic/loss"] / value_denominator if value_denominator else 0.0,
        "critic/explained_variance": 1 - errors / returns if returns > 0 else 0.0,
        "critic/value_mean": sums["critic/value"] / num,
        "critic/return_mean": sums["critic/return"] / num,
    }
    for name, value in sums.items():
        if name.startswith(OF_RECIPE):
            metrics[f"critic/{name.removeprefix(OF_RECIPE)}"] = value / num
    if step is not None and step.critic is not None:
        metrics["critic/grad_norm"] = step.critic.grad_norm
        metrics["critic/learning_rate"] = step.critic.learning_rate
    return metrics


def _variance(total: float, squares: float, num: float) -> float:
    return max(squares / num - (total / num) ** 2, 0.0)
