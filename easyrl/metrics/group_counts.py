"""What is counted of a finished group: lengths, rewards, repetition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
        lengths = np.array([len(c.sampled_ids) for c in group.completions])
        in_full = sum(_sequence_tokens(c, group.prompt) for c in group.completions)
        maxima = {
            "response_length": float(lengths.max()),
            "minus_response_length": -float(lengths.min()),
        }
        ngrams = count_ngrams([c.sampled_ids for c in group.completions])
        sums = {
            "groups": 1.0,
            "groups_moved": float(group.bytes_moved > 0),
            "bytes_moved": float(group.bytes_moved),
            "prompt_tokens": float(len(group.prompt.token_ids)),
            "responses": float(len(lengths)),
            "response_tokens": float(lengths.sum()),
            "sequence_tokens": float(in_full),
            "generated_tokens": 0.0 if recovered else float(lengths.sum()),
            "truncated": float(sum(c.truncated for c in group.completions)),
            "ngrams": float(ngrams.num),
            "repeated_ngrams": float(ngrams.num_repeated),
        }
        if recovered:
            sums["groups_recovered"] = 1.0
        if group.scores:
            rewards = group.rewards[group.unmasked].astype(np.float64)
            largest, smallest = float(rewards.max()), float(rewards.min())
            sums |= {
                "samples_scored": float(len(rewards)),
                "samples_masked": float(len(group.scores) - len(rewards)),
                "reward": float(rewards.sum()),
                "reward_square": float(np.square(rewards).sum()),
                "reward_std": float(rewards.std()),
                "flat_groups": float(largest == smallest),
                "reward_failures": float(sum(s.failed for s in group.scores)),
            }
            maxima |= {"reward": largest, "minus_reward": -smallest}
        for score in group.scores:
            for name, value in score.components.items():
                terms = {"rewards": value, "squares": value**2, "opinions": 1.0}
                for kind, term in terms.items():
                    sums[f"{kind}/{name}"] = sums.get(f"{kind}/{name}", 0.0) + term
        outcome = GroupOutcome.of(group, recovered=recovered)
        return cls(outcome, MetricSums(sums, maxima), group.dispatched_s, group.completed_s)


def _sequence_tokens(completion: Completion, prompt: Prompt) -> int:
    """Of a response with its prompt; an episode's tree holds its prompts itself."""
    own = len(completion.token_ids)
    return own if completion.episode is not None else own + len(prompt.token_ids)
