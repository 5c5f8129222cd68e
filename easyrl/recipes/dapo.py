"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from easyrl.recipes.estimators import Aggregation
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import RunSettings
from easyrl.rewards.overlong import overlong_punishment
from easyrl.schema import Completion, RolloutGroup


@dataclass(frozen=True)
class DAPO(GRPO):
    r"""GRPO with a higher upper clip, a mean over tokens, soft overlong punishment, no KL, and only
    groups that say something.

    .. math::
        L = -\frac{1}{\sum_i |o_i|} \sum_i \sum_t \min(\rho_{i,t} A_i,
            \mathrm{clip}(\rho_{i,t}, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_i)
        \quad \text{(eq. 8)}

        R_{length}(y) = 0 \text{ up to } L_{max} - L_{cache}, \text{ then }
            \frac{(L_{max} - L_{cache}) - |y|}{L_{cache}} \text{ down to } -1 \quad \text{(eq. 13)}

    added to each response's reward, with ``L_max = rollout.max_tokens``; of an episode, whose turns
    are bounded by that each for itself, ``|y|`` is its longest turn's. Dynamic sampling (eq. 11):
    a group whose rewards, before that, are all equal is replaced by another prompt's. Defaults as
    published (§4.1): 0.2 and 0.28, L_cache 4096 of L_max 20480 tokens.
    """

    aggregation: Aggregation = "token"
    clip_eps_high: PositiveFloat = 0.28
    kl_coef: NonNegativeFloat = 0.0
    overlong_buffer: Annotated[float, Field(ge=0, le=1)] = 0.2  # L_cache / L_max; 0: no punishment
    overlong_penalty: NonNegativeFloat = 1.0  # of a response of L_max tokens
    dynamic_sampling: bool = True

    def notices(self) -> list[str]:
        said = super().notices()
        if self.is_set("overlong_penalty") and self.overlong_buffer == 0:
            said.append(
                "overlong_penalty: has no effect without a buffer; remove it, or set "
                "recipe.overlong_buffer above 0"
            )
        return said

    def rewards(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        if self.overlong_buffer == 0:
            return group.rewards
        punishment = self._punishment(group, run)
        return group.rewards + (self.overlong_penalty * punishment).astype(np.float32)

    def weighted_rewards(
        self, group: RolloutGroup, run: RunSettings
    ) -> list[tuple[float, np.ndarray]]:
        """The punishment is one of them, ``overlong_penalty`` its weight."""
        weighted = super().weighted_rewards(group, run)
        if self.overlong_buffer > 0:
            weighted.append((self.overlong_penalty, self._punishment(group, run)))
        return weighted

    def _punishment(self, group: RolloutGroup, run: RunSettings) -> np.ndarray:
        """float64 [G], from 0 down to -1."""
        lengths = np.array([_longest_answer(c) for c in group.completions], dtype=np.float64)
        return overlong_punishment(lengths, run.max_tokens, self.overlong_buffer)


def _longest_answer(completion: Completion) -> int:
    """Tokens that one request has sampled, at most."""
    if completion.episode is None:
        return len(completion.token_ids)
    return max(turn.end - turn.sampled for turn in completion.episode.turns)
