"""What is counted of a finished group: lengths, rewards, repetition."""

from __future__ import annotations

import math
from typing import NamedTuple

from easyrl.engines.base import MetricSums
from easyrl.metrics.repetition import count_ngrams
from easyrl.schema import Completion, GroupOutcome, Prompt, RolloutGroup


class GroupCounts(NamedTuple):
    """A group's share of ``BatchTotals``; no other group changes it."""

    outcome: GroupOutcome
    metrics: MetricSums
    dispatched_s: float  # of this rank's clock
    completed_s: float

    @classmethod
    def of(cls, group: RolloutGroup, *, recovered: bool = False) -> GroupCounts:
        """``recovered``: it was finished in an earlier attempt, none of its tokens is generated in
        this one."""
        sampled = [c.sampled_ids for c in group.completions]
        lengths = [len(token_ids) for token_ids in sampled]
        in_full = sum(_sequence_tokens(c, group.prompt) for c in group.completions)
        maxima = {
            "response_length": float(max(lengths)),
            "minus_response_length": -float(min(lengths)),
        }
        ngrams = count_ngrams(sampled)
        sums = {
            "groups": 1.0,
            "groups_moved": float(group.bytes_moved > 0),
            "bytes_moved": float(group.bytes_moved),
            "prompt_tokens": float(len(group.prompt.token_ids)),
            "responses": float(len(lengths)),
            "response_tokens": float(sum(lengths)),
            "sequence_tokens": float(in_full),
            "generated_tokens": 0.0 if recovered else float(sum(lengths)),
            "truncated": float(sum(c.truncated for c in group.completions)),
            "ngrams": float(ngrams.num),
            "repeated_ngrams": float(ngrams.num_repeated),
        }
        if recovered:
            sums["groups_recovered"] = 1.0
        if group.scores:
            # Python's own arithmetic: for a group's few numbers each call of numpy's costs more
            rewards = group.rewards[group.unmasked].tolist()
            largest, smallest = max(rewards), min(rewards)
            sums |= {
                "samples_scored": float(len(rewards)),
                "samples_masked": float(len(group.scores) - len(rewards)),
                "reward": sum(rewards),
                "reward_square": sum(reward * reward for reward in rewards),
                "reward_std": _deviation(rewards),
                "flat_groups": float(largest == smallest),
                "reward_failures": float(sum(s.failed for s in group.scores)),
            }
            maxima |= {"reward": largest, "minus_reward": -smallest}
        said: dict[str, list[float]] = {}
        for score in group.scores:
            for name, value in score.components.items():
                said.setdefault(name, []).append(value)
        for name, values in said.items():
            sums[f"rewards/{name}"] = sum(values)
            sums[f"squares/{name}"] = sum(value**2 for value in values)
            sums[f"opinions/{name}"] = float(len(values))
        outcome = GroupOutcome.of(group, recovered=recovered)
        return cls(outcome, MetricSums(sums, maxima), group.dispatched_s, group.completed_s)


def _deviation(values: list[float]) -> float:
    """Of a population."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / len(values))


def _sequence_tokens(completion: Completion, prompt: Prompt) -> int:
    """Of a response with its prompt; an episode's tree holds its prompts itself."""
    own = len(completion.token_ids)
    return own if completion.episode is not None else own + len(prompt.token_ids)
