"""Trained groups and records of samples, by their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.metrics.batch_metrics import BatchTotals, Update
from easyrl.samples.choice import ChosenGroups
from easyrl.samples.records import SampledGroup, SampledResponse
from easyrl.schema import (
    Completion,
    Prompt,
    RolloutGroup,
    Score,
    TrainedGroup,
    TrainedResponse,
    VersionSpan,
)


def trained(
    index: int,
    rewards: Sequence[float],
    advantages: Sequence[Any] = (),
    *,
    epoch: int = 0,
    cut_off: Sequence[int] = (),
    **prompt: Any,
) -> TrainedGroup:
    """One response per reward, of three tokens that say which it is."""
    completions, scores, responses = [], [], []
    for sample, reward in enumerate(rewards):
        token_ids = np.array([index, sample, 7], dtype=np.int32)
        completions.append(
            Completion(
                token_ids,
                np.zeros(3, dtype=np.float32),
                "length" if sample in cut_off else "stop",
                (VersionSpan("run:0:0", 0, 3),),
                "http://fake:1",
                np.ones(3, dtype=bool),
            )
        )
        scores.append(Score(reward, {"exact": reward, "format": 1.0}))
        own = advantages[sample] if len(advantages) else reward
        if own is not None:
            values = np.broadcast_to(np.asarray(own, dtype=np.float64), 3)
            responses.append(TrainedResponse(sample, np.arange(3), values, np.ones(3)))
    prompt_ids = np.array([100, index], dtype=np.int32)
    of_run = Prompt(index, prompt_ids, "question", prompt.pop("answer", None), epoch, **prompt)
    group = RolloutGroup(
        of_run, tuple(completions), tuple(scores), "run:0:0", 0.0, 1.0, position=index
    )
    return TrainedGroup(group, tuple(responses))


def update_of(*groups: TrainedGroup, most: int = 4) -> Update:
    """An optimizer step that has trained ``groups``."""
    chosen = ChosenGroups(most)
    chosen.add(groups)
    return Update(BatchTotals(samples=chosen))


def sampled(step: int, index: int, rewards: Sequence[float], **keys: Any) -> SampledGroup:
    """A kept group as it is read back."""
    responses = [
        SampledResponse([index, i, 7], "stop", reward=reward, components={"exact": reward})
        for i, reward in enumerate(rewards)
    ]
    given = {"responses": responses, "why": "drawn"} | keys
    return SampledGroup(step, 0, index, index, "run:0:0", prompt_ids=[100, index], **given)
