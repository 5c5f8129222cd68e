"""What is counted while a batch is trained, and the metrics made of it when it closes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from easyrl.engines.base import MetricSums, StepResult
from easyrl.runtime.collectives import Collectives
from easyrl.schema import GroupOutcome, RolloutGroup

AGAINST_INFERENCE = ("policy/logprob_diff", "policy/logprob_diff_max", "policy/inference_kl")


@dataclass
class BatchTotals:
    """Sums of one update of one rank, or of all ranks after ``merge``."""

    denominator: float = 0.0  # late scalar, docs/recipes.md
    metrics: MetricSums = field(default_factory=MetricSums)
    num_packed_tokens: int = 0  # dummies, which only keep ranks in step, do not count
    num_micro_batches: int = 0  # nor do they here
    num_look_ahead_tokens: int = 0  # trained ones that the frozen models had seen before their row
    wait_s: float = 0.0
    first_group_wait_s: float = 0.0
    look_ahead_s: float = 0.0
    train_s: float = 0.0
    num_ranks: int = 1
    groups: list[GroupOutcome] = field(default_factory=list)  # trained, unless the step is skipped
    interruption: Exception | None = None  # why this rank's groups have ended early

    def add_group(self, group: RolloutGroup, *, recovered: bool = False) -> None:
        """Counts a group's rewards and lengths."""
        self.groups.append(GroupOutcome.of(group, recovered=recovered))
        if recovered:
            self.metrics.add(MetricSums({"groups_recovered": 1.0}))
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

    def add(self, other: BatchTotals) -> None:
        """The next update's sums, of all ranks."""
        self.denominator += other.denominator
        self.metrics.add(other.metrics)
        self.num_packed_tokens += other.num_packed_tokens
        self.num_micro_batches += other.num_micro_batches
        self.num_look_ahead_tokens += other.num_look_ahead_tokens
        self.wait_s += other.wait_s
        self.first_group_wait_s = self.first_group_wait_s or other.first_group_wait_s
        self.look_ahead_s += other.look_ahead_s
        self.train_s += other.train_s

    def merge(self, collectives: Collectives) -> BatchTotals:
        """The totals of all ranks. Collective."""
        rows = collectives.all_gather(
            {
                "numbers": [
                    self.denominator,
                    self.num_packed_tokens,
                    self.num_micro_batches,
                    self.num_look_ahead_tokens,
                    self.wait_s,
                    self.first_group_wait_s,
                    self.look_ahead_s,
                    self.train_s,
                ],
                # NaN has no JSON form; a string survives
                "sums": {name: repr(value) for name, value in self.metrics.sums.items()},
                "maxima": {name: repr(value) for name, value in self.metrics.maxima.items()},
                "groups": msgspec.to_builtins(self.groups),
            }
        )
        merged = BatchTotals(num_ranks=len(rows))
        for rank, row in enumerate(rows):
            denominator, tokens, micro_batches, ahead, *seconds = row["numbers"]
            wait_s, first_s, look_ahead_s, train_s = seconds
            merged.denominator += denominator
            merged.num_packed_tokens += int(tokens)
            merged.num_micro_batches += int(micro_batches)
            merged.num_look_ahead_tokens += int(ahead)
            merged.wait_s += wait_s / len(rows)
            merged.first_group_wait_s += first_s / len(rows)
            merged.look_ahead_s += look_ahead_s / len(rows)
            merged.train_s += train_s / len(rows)
            merged.metrics.add(
                MetricSums(
                    {name: float(value) for name, value in row["sums"].items()},
                    {name: float(value) for name, value in row["maxima"].items()},
                )
            )
            groups = msgspec.convert(row["groups"], list[GroupOutcome])
            merged.groups += [msgspec.structs.replace(group, rank=rank) for group in groups]
        merged.groups.sort(key=lambda group: group.position)
        return merged


@dataclass
class Update:
    """One optimizer step of a batch."""

    totals: BatchTotals  # of all ranks
    result: StepResult | None = None  # None: every token was masked
    check_s: float = 0.0  # how long the groups were looked at before the step
    optimizer_s: float = 0.0

    @property
    def skipped(self) -> bool:
        return self.result is None or self.result.skipped


def batch_metrics(updates: Sequence[Update], groups: Sequence[GroupOutcome]) -> dict[str, float]:
    """The metrics of a closed batch; seconds end in ``_s`` and are means over ranks.

    With several updates: tokens and seconds are sums, ``loss``, ``grad_norm`` and ``policy/*``
    means over the updates, and each update's own are under ``update<i>/``. The comparison with the
    inference server is the first update's. ``groups`` are all that the batch has drawn.
    """
    rows = [_update_metrics(update) for update in updates]
    outcomes = Counter(group.outcome for group in groups)
    drawn = {
        "batch/groups_drawn": float(len(groups)),
        "batch/groups_rejected": float(outcomes["rejected"]),
        "batch/groups_excluded": float(outcomes["excluded"]),
    }
    if len(rows) == 1:
        return rows[0] | drawn
    whole = BatchTotals()
    for update in updates:
        whole.add(update.totals)
    last = updates[-1]
    metrics = _update_metrics(Update(whole, result=last.result))
    for name in metrics:
        if name in AGAINST_INFERENCE:  # later updates train weights that have moved on
            metrics[name] = rows[0].get(name, 0.0)
        elif _is_of_recipe(name):
            metrics[name] = float(np.mean([row.get(name, 0.0) for row in rows]))
    metrics["time/optimizer_s"] = sum(row["time/optimizer_s"] for row in rows)
    metrics["step_skipped"] = sum(row["step_skipped"] for row in rows)
    for number, row in enumerate(rows, start=1):
        metrics |= {f"update{number}/{n}": value for n, value in row.items() if _is_of_recipe(n)}
    return metrics | drawn


def _is_of_recipe(name: str) -> bool:
    return name in ("loss", "grad_norm") or name.startswith("policy/")


def _update_metrics(update: Update) -> dict[str, float]:
    totals, step = update.totals, update.result
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
        "tokens/compared": loss_tokens,  # with the inference server; policy/* are means over them
        "tokens/packed": float(totals.num_packed_tokens),
        "batch/groups": groups,
        "batch/groups_without_signal": sums.pop("groups_without_signal", 0.0),
        "batch/groups_recovered": sums.pop("groups_recovered", 0.0),
        "batch/micro_batches": float(totals.num_micro_batches),
        "batch/look_ahead_tokens": float(totals.num_look_ahead_tokens),
        "batch/denominator": totals.denominator,
        "time/wait_s": totals.wait_s,
        "time/first_group_wait_s": totals.first_group_wait_s,
        "time/look_ahead_s": totals.look_ahead_s,
        "time/train_s": totals.train_s,
        "time/optimizer_s": update.optimizer_s,
        "loss": _ratio(sums.pop("loss_sum", 0.0), totals.denominator),
    }
    for name in [name for name in sums if name.startswith("rewards/")]:
        metrics[f"reward/{name.removeprefix('rewards/')}"] = _ratio(sums.pop(name), responses)
    # what the recipe counted: means over the tokens that went through the model, maxima as they are
    for name, value in sums.items():
        if name.endswith("_sum"):
            metrics[f"policy/{name.removesuffix('_sum')}"] = _ratio(value, loss_tokens)
    for name, value in totals.metrics.maxima.items():
        if name != "response_length":
            metrics[f"policy/{name}"] = value
    if step is not None:
        metrics["grad_norm"] = step.grad_norm
        metrics["learning_rate"] = step.learning_rate
    metrics["step_skipped"] = float(update.skipped)
    return metrics


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
