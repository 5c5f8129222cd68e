"""What is counted while a batch is trained, and the metrics made of it when it closes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from easyrl.agreement import Agreement
from easyrl.engines.base import MetricSums, StepResult
from easyrl.schema import RolloutGroup


@dataclass
class BatchTotals:
    """Sums of one rank, or of all ranks after ``merge``."""

    denominator: float = 0.0  # late scalar, DESIGN §2.4
    metrics: MetricSums = field(default_factory=MetricSums)
    num_packed_tokens: int = 0  # dummies, which only keep ranks in step, do not count
    num_micro_batches: int = 0  # nor do they here
    wait_s: float = 0.0
    first_group_wait_s: float = 0.0
    train_s: float = 0.0
    num_ranks: int = 1

    def add_group(self, group: RolloutGroup) -> None:
        """Counts a group's rewards and lengths."""
        rewards = group.rewards.astype(np.float64)
        lengths = np.array([len(c.token_ids) for c in group.completions])
        sums = {
            "groups": 1.0,
            "prompt_tokens": float(len(group.prompt.token_ids)),
            "responses": float(len(rewards)),
            "response_tokens": float(lengths.sum()),
            "truncated": float(sum(c.truncated for c in group.completions)),
            "reward": float(rewards.sum()),
            "reward_std": float(rewards.std()),
            "flat_groups": float(np.ptp(rewards) == 0),
            "reward_failures": float(sum(s.failed for s in group.scores)),
        }
        for score in group.scores:
            for name, value in score.components.items():
                sums[f"rewards/{name}"] = sums.get(f"rewards/{name}", 0.0) + value
        self.metrics.add(MetricSums(sums, {"response_length": float(lengths.max())}))

    def merge(self, agreement: Agreement) -> BatchTotals:
        """The totals of all ranks. Collective."""
        rows = agreement.exchange(
            {
                "numbers": [
                    self.denominator,
                    self.num_packed_tokens,
                    self.num_micro_batches,
                    self.wait_s,
                    self.first_group_wait_s,
                    self.train_s,
                ],
                # NaN has no JSON form; a string survives
                "sums": {name: repr(value) for name, value in self.metrics.sums.items()},
                "maxima": {name: repr(value) for name, value in self.metrics.maxima.items()},
            }
        )
        merged = BatchTotals(num_ranks=len(rows))
        for row in rows:
            denominator, tokens, micro_batches, wait_s, first_s, train_s = row["numbers"]
            merged.denominator += denominator
            merged.num_packed_tokens += int(tokens)
            merged.num_micro_batches += int(micro_batches)
            merged.wait_s += wait_s / len(rows)
            merged.first_group_wait_s += first_s / len(rows)
            merged.train_s += train_s / len(rows)
            merged.metrics.add(
                MetricSums(
                    {name: float(value) for name, value in row["sums"].items()},
                    {name: float(value) for name, value in row["maxima"].items()},
                )
            )
        return merged


def batch_metrics(totals: BatchTotals, step: StepResult | None) -> dict[str, float]:
    """The metrics of a closed batch; seconds end in ``_s`` and are means over ranks."""
    sums = dict(totals.metrics.sums)
    groups, responses = sums.pop("groups", 0.0), sums.pop("responses", 0.0)
    loss_tokens = sums.get("num_loss_tokens", 0.0)
    metrics = {
        "reward/mean": _ratio(sums.pop("reward", 0.0), responses),
        "reward/group_std": _ratio(sums.pop("reward_std", 0.0), groups),
        "reward/flat_groups": _ratio(sums.pop("flat_groups", 0.0), groups),
        "reward/failures": sums.pop("reward_failures", 0.0),
        "response/mean_tokens": _ratio(sums.get("response_tokens", 0.0), responses),
        "response/max_tokens": totals.metrics.maxima.get("response_length", 0.0),
        "response/truncated": _ratio(sums.pop("truncated", 0.0), responses),
        "tokens/prompt": sums.pop("prompt_tokens", 0.0),
        "tokens/response": sums.pop("response_tokens", 0.0),
        "tokens/packed": float(totals.num_packed_tokens),
        "batch/groups": groups,
        "batch/micro_batches": float(totals.num_micro_batches),
        "batch/denominator": totals.denominator,
        "time/wait_s": totals.wait_s,
        "time/first_group_wait_s": totals.first_group_wait_s,
        "time/train_s": totals.train_s,
        "loss": _ratio(sums.pop("loss_sum", 0.0), totals.denominator),
    }
    for name in [name for name in sums if name.startswith("rewards/")]:
        metrics[f"reward/{name.removeprefix('rewards/')}"] = _ratio(sums.pop(name), responses)
    # what the objective counted: means over the trained tokens, maxima as they are
    for name, value in sums.items():
        if name.endswith("_sum"):
            metrics[f"policy/{name.removesuffix('_sum')}"] = _ratio(value, loss_tokens)
    for name, value in totals.metrics.maxima.items():
        if name != "response_length":
            metrics[f"policy/{name}"] = value
    if step is not None:
        metrics["grad_norm"] = step.grad_norm
        metrics["learning_rate"] = step.learning_rate
    metrics["step_skipped"] = float(step is None or step.skipped)
    return metrics


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
