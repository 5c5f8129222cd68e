"""How the tokens of a batch's responses are weighed in the loss: three published ways.

The loss is ``sum(weight * token loss) / denominator``; TRL calls these ``grpo``, ``dapo`` and
``dr_grpo``.

- ``sequence`` (GRPO: DeepSeekMath, eq. 3): mean over a response's tokens, then over responses.
- ``token`` (DAPO, eq. 8): mean over all tokens.
- ``constant`` (Dr. GRPO, §3.2): ``max_tokens`` in place of each response's length.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["sequence", "token", "constant"]


def aggregation_weights(
    trained: np.ndarray, aggregation: Aggregation, max_tokens: int
) -> np.ndarray:
    """float [R], the weights of a response's tokens; ``trained`` bool [R] are those that count."""
    weight = {
        "sequence": 1.0 / max(1, int(trained.sum())),
        "token": 1.0,
        "constant": 1.0 / max_tokens,
    }[aggregation]
    return np.full(len(trained), weight)
