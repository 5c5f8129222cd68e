"""A scorer that finds every response worth the same, at once."""

from __future__ import annotations

from collections.abc import Sequence

from easyrl.schema import Completion, Prompt, Score


class OneReward:
    """A ``Scorer`` of reward 1."""

    async def score_sample(self, prompt: Prompt, completion: Completion) -> float:
        return 1.0

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion], sample_scores: Sequence[float]
    ) -> tuple[Score, ...]:
        return tuple(Score(reward, {"one": reward}) for reward in sample_scores)
