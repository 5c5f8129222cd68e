"""A group of given tokens that nobody has generated, for benchmarks of training alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from easyrl.schema import Completion, Prompt, RolloutGroup, Score


def made_up_group(index: int, prompt: np.ndarray, responses: Sequence[np.ndarray]) -> RolloutGroup:
    """``prompt`` and ``responses``: int32 token ids. Rewards and log-probabilities are zero."""
    return RolloutGroup(
        prompt=Prompt(index=index, token_ids=prompt, text="", answer=None),
        completions=tuple(
            Completion(
                token_ids=response,
                logprobs=np.zeros(len(response), dtype=np.float32),
                finish_reason="stop",
                version_spans=(),
                endpoint="",
                loss_mask=np.ones(len(response), dtype=np.bool_),
            )
            for response in responses
        ),
        scores=tuple(Score(0.0, {}) for _ in responses),
        policy_version="benchmark:0:0",
        dispatched_s=0.0,
        completed_s=0.0,
    )
