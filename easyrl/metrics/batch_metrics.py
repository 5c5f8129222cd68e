"""What is counted while a batch is trained, and the metrics made of it when it closes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import msgspec
import numpy as np

from easyrl.engines.base import LogprobComparison, MetricSums, StepResult
from easyrl.metrics.critic_metrics import critic_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.runtime.collectives import Collectives
from easyrl.samples.choice import ChosenGroups
from easyrl.schema import GroupOutcome

AGAINST_INFERENCE = ("policy/logprob_diff", "policy/logprob_diff_max", "policy/inference_kl")


# Of BatchTotals: what is a sum over the ranks, and what a mean.
COUNTS = (
    "denominator",
    "value_denominator",
    "num_packed_tokens",
    "num_micro_batches",
    "num_look_ahead_tokens",
)
SECONDS = ("wait_s", "first_group_wait_s", "look_ahead_s", "train_s")
# Of MetricSums.maxima those that no recipe counts; ``minus_``: minima with their sign turned.
OWN_MAXIMA = ("response_length", "minus_response_length", "reward", "minus_reward")


@dataclass
class BatchTotals:
    """Sums of one update of one rank, or of all ranks after ``merge``."""

    denominator: float = 0.0  # late scalar, docs/recipes.md
    value_denominator: float = 0.0  # of the critic's loss; 0 without one
    metrics: MetricSums = field(default_factory=MetricSums)
    num_packed_tokens: int = 0  # dummies, which only keep ranks in step, do not count
    num_micro_batches: int = 0  # nor do they here
    num_look_ahead_tokens: int = 0  # trained ones that the frozen models had seen before their row
    wait_s: float = 0.0
    first_group_wait_s: float = 0.0
    look_ahead_s: float = 0.0
    train_s: float = 0.0
    num_ranks: int = 1
    # Of this attempt's groups, in seconds of its rank's clock: when the first request was sent, and
    # when the group was complete. After ``merge`` the latter counts from the rank's first request.
    dispatched_s: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    # By rank, after ``merge``: the first request of the groups above, and the last one complete.
    generating_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    groups: list[GroupOutcome] = field(default_factory=list)  # trained, unless the step is skipped
    interruption: Exception | None = None  # why this rank's groups have ended early
    # of this rank's groups, after ``merge`` those that are chosen of all ranks' together
    samples: ChosenGroups = field(default_factory=ChosenGroups)

    def add_counts(self, counts: GroupCounts) -> None:
        """Of the next group."""
        self.groups.append(counts.outcome)
        if not counts.outcome.recovered:
            self.dispatched_s.append(counts.dispatched_s)
            self.arrived_s.append(counts.completed_s)
        self.metrics.add(counts.metrics)

    def add(self, other: BatchTotals) -> None:
        """The next update's sums, of all ranks."""
        first_group_wait_s = self.first_group_wait_s or other.first_group_wait_s
        for name in (*COUNTS, *SECONDS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_group_wait_s = first_group_wait_s
        self.arrived_s += other.arrived_s
        for rank, (first_s, last_s) in other.generating_s.items():
            earlier = self.generating_s.get(rank, (first_s, last_s))
            self.generating_s[rank] = (min(earlier[0], first_s), max(earlier[1], last_s))
        self.metrics.add(other.metrics)

    def merge(self, collectives: Collectives) -> BatchTotals:
        """The totals of all ranks. Collective."""
        first_s = min(self.dispatched_s, default=0.0)
        rows = collectives.all_gather(
            {
                "arrived_s": [arrived_s - first_s for arrived_s in self.arrived_s],
                "first_s": first_s,
                "numbers": {name: getattr(self, name) for name in (*COUNTS, *SECONDS)},
                # NaN has no JSON form; a string survives
                "sums": {name: repr(value) for name, value in self.metrics.sums.items()},
                "maxima": {name: repr(value) for name, value in self.metrics.maxima.items()},
                "compared": {
                    url: list(map(repr, astuple(sums)))
                    for url, sums in self.metrics.compared.items()
                },
                "groups": msgspec.to_builtins(self.groups),
                "samples": self.samples.told(),
            }
        )
        samples = self.samples.among([row["samples"] for row in rows])
        merged = BatchTotals(num_ranks=len(rows), samples=samples)
        for name in COUNTS:
            setattr(merged, name, sum(row["numbers"][name] for row in rows))
        for name in SECONDS:
            setattr(merged, name, sum(row["numbers"][name] for row in rows) / len(rows))
        for rank, row in enumerate(rows):
            merged.arrived_s += row["arrived_s"]
            if row["arrived_s"]:
                last_s = row["first_s"] + max(row["arrived_s"])
                merged.generating_s[rank] = (row["first_s"], last_s)
            sums, maxima = (
                {name: float(value) for name, value in row[kind].items()}
                for kind in ("sums", "maxima")
            )
            compared = {
                url: LogprobComparison(*map(float, values))
                for url, values in row["compared"].items()
            }
            merged.metrics.add(MetricSums(sums, maxima, compared))
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

    With several updates: tokens and seconds are sums, ``loss``, ``grad_norm``, ``policy/*`` and
    ``critic/*`` means over the updates, and each update's own are under ``update<i>/``. The times
    of arrival (``time/…_group_s``) are of all groups, each after the first request of its rank's
    update. The comparison with the inference server is the first update's. ``groups`` are all that
    the batch has drawn. ``balance/*``, of what ranks have handed over, is there where there are
    several.
    """
    rows = [_update_metrics(update) for update in updates]
    outcomes = Counter(group.outcome for group in groups)
    exclusions = Counter(group.exclusion for group in groups)
    drawn = {
        "batch/groups_drawn": float(len(groups)),
        "batch/groups_rejected": float(outcomes["rejected"]),
        "batch/groups_excluded": float(outcomes["excluded"]),
        "batch/groups_excluded_refused": float(exclusions["refused"]),
        "batch/groups_excluded_too_long": float(exclusions["too_long"]),
    }
    if updates[0].totals.num_ranks > 1:
        drawn |= {
            f"balance/{name}": sum(u.totals.metrics.sums.get(name, 0.0) for u in updates)
            for name in ("groups_moved", "bytes_moved")
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
    return name in ("loss", "grad_norm") or name.startswith(("policy/", "critic/"))


def _update_metrics(update: Update) -> dict[str, float]:
    totals, step = update.totals, update.result
    sums = defaultdict(float, totals.metrics.sums)  # zero for what was not counted
    groups, responses, loss_tokens = sums["groups"], sums["responses"], sums["num_loss_tokens"]
    metrics: dict[str, float] = {}
    if "reward" in sums:
        metrics = {
            "reward/mean": _ratio(sums["reward"], sums["samples_scored"]),
            "reward/std": _sample_std(
                sums["reward"], sums["reward_square"], sums["samples_scored"]
            ),
            "reward/min": -totals.metrics.maxima["minus_reward"],
            "reward/max": totals.metrics.maxima["reward"],
            "reward/group_std": _ratio(sums["reward_std"], groups),
            "reward/flat_groups": _ratio(sums["flat_groups"], groups),
            "reward/failures": sums["reward_failures"],
            "reward/masked": sums["samples_masked"],
        }
    metrics |= {
        "response/mean_tokens": _ratio(sums["response_tokens"], responses),
        "response/min_tokens": -totals.metrics.maxima.get("minus_response_length", 0.0),
        "response/max_tokens": totals.metrics.maxima.get("response_length", 0.0),
        "response/truncated": _ratio(sums["truncated"], responses),
        "response/repetition": _ratio(sums["repeated_ngrams"], sums["ngrams"]),
        "tokens/prompt": sums["prompt_tokens"],
        "tokens/response": sums["response_tokens"],
        "tokens/sequences": sums["sequence_tokens"],
        "tokens/compared": loss_tokens,  # with the inference server; policy/* are means over them
        "tokens/packed": totals.num_packed_tokens,
        "batch/groups": groups,
        "batch/groups_without_signal": sums["groups_without_signal"],
        "batch/groups_recovered": sums["groups_recovered"],
        "batch/micro_batches": totals.num_micro_batches,
        "batch/look_ahead_tokens": totals.num_look_ahead_tokens,
        "batch/denominator": totals.denominator,
        "time/wait_s": totals.wait_s,
        "time/first_group_wait_s": totals.first_group_wait_s,
        **_arrivals(totals.arrived_s),
        "time/look_ahead_s": totals.look_ahead_s,
        "time/train_s": totals.train_s,
        "time/optimizer_s": update.optimizer_s,
    }
    if (seconds := _generating_s(totals)) > 0:
        metrics["throughput/generated_tokens_per_s"] = sums["generated_tokens"] / seconds
    for name, value in sums.items():
        if name.startswith("rewards/"):
            reward = name.removeprefix("rewards/")
            scored = sums[f"opinions/{reward}"]  # responses that it has an opinion on
            mean = _ratio(value, scored)
            variance = _ratio(sums[f"squares/{reward}"], scored) - mean**2
            metrics[f"reward/{reward}/mean"] = mean
            metrics[f"reward/{reward}/std"] = math.sqrt(max(variance, 0.0))
    for name, value in recipe_metrics(totals).items():
        metrics[name if name == "loss" else f"policy/{name}"] = value
    if {"policy/clip_low", "policy/clip_high"} <= metrics.keys():  # never both at a token
        metrics["policy/clipped"] = metrics["policy/clip_low"] + metrics["policy/clip_high"]
    if step is not None:
        metrics |= {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
    metrics |= critic_metrics(sums, totals.value_denominator, step)
    metrics["step_skipped"] = update.skipped
    return {name: float(value) for name, value in metrics.items()}


def recipe_metrics(totals: BatchTotals) -> dict[str, float]:
    """``loss``, and what the recipe counted: means over the tokens that went through the model, or
    over what the recipe says, and maxima."""
    sums, maxima = totals.metrics.sums, totals.metrics.maxima
    num_tokens = sums.get("num_loss_tokens", 0.0)
    metrics = {"loss": _ratio(sums.get("loss_sum", 0.0), totals.denominator)}
    of_rewards = ("rewards/", "squares/", "opinions/")
    for name, value in sums.items():
        if name.endswith("_sum") and name != "loss_sum" and not name.startswith(of_rewards):
            own = name.removesuffix("_sum")
            metrics[own] = _ratio(value, sums.get(f"{own}_num", num_tokens))
    return metrics | {n: value for n, value in maxima.items() if n not in OWN_MAXIMA}


def _generating_s(totals: BatchTotals) -> float:
    """From the first request to the last complete group, of the rank that took longest."""
    return max((last_s - first_s for first_s, last_s in totals.generating_s.values()), default=0.0)


def _sample_std(total: float, squares: float, num: float) -> float:
    """Divided by ``num - 1``; 0 for one value."""
    if num < 2:
        return 0.0
    return math.sqrt(max(squares - total**2 / num, 0.0) / (num - 1))


def _arrivals(arrived_s: Sequence[float]) -> dict[str, float]:
    """When groups were complete, after the first request of their rank's update."""
    if not arrived_s:  # an earlier attempt's, all of them
        return {}
    return {
        "time/first_group_s": min(arrived_s),
        "time/median_group_s": float(np.median(arrived_s)),
        "time/last_group_s": max(arrived_s),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
