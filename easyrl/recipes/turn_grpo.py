"""GRPO with turn-level advantages, after MT-GRPO (Zeng et al. 2025, arXiv 2505.11821)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat

from easyrl.recipes.estimators import group_advantages
from easyrl.recipes.grpo import GRPO
from easyrl.recipes.recipe import AdvantageInputs, Advantages, RunSettings
from easyrl.schema import Episode, RolloutGroup


@dataclass(frozen=True)
class TurnGRPO(GRPO):
    r"""GRPO in which a turn of an episode is also credited with its own reward.

    .. math::
        A_{i,k} = A_i + c\, \frac{r_{i,k} - \mathrm{mean}_j(r_{j,k})}{\mathrm{std}_j(r_{j,k})}

    for all tokens that turn k of episode i has sampled: A_i is GRPO's of the outcome, r_{i,k} the
    reward that the environment gave that turn, c ``turn_coef``. Mean and deviation are over the
    group's episodes with a turn k that have turn rewards; where there is only one, or they are
    equal, the turn has A_i alone. Turns are counted as they were recorded, those of a sub-agent
    among them.

    MT-GRPO of two turns, of which the first has a reward, gives the tokens of the first
    A^turn + lambda A^outcome, those of the second A^outcome. With c = 1, and a second turn whose
    rewards are all equal, this is that with lambda = 1. Rewards of later turns are not added to
    earlier ones.

    With ``credit: branch`` whole branches are rewarded: sub-agents, attempts that were given up,
    histories before and behind a compaction. The reward R_{i,b} of branch b, from the tree's root
    to a turn that none continues, is the sum of its turns'; so an environment may reward the last
    turn of each alone. A turn, which is trained once, has the mean of its branches':

    .. math::
        A_{i,k} = A_i + c\, \mathrm{mean}_{b \ni k}
            \frac{R_{i,b} - \mathrm{mean}(R)}{\mathrm{std}(R)}

    with mean and deviation over all branches of the group's episodes that have turn rewards.

    ``advantage: group_mean`` leaves out both deviations; with ``each_reward_std`` turn rewards are
    divided by theirs. Responses that are no episode, and episodes without turn rewards, have A_i.
    """

    turn_coef: NonNegativeFloat = 1.0  # of the turn's advantage, beside the outcome's
    credit: Literal["turn", "branch"] = "turn"  # what a turn is credited with

    def accepts(self, group: RolloutGroup, run: RunSettings) -> str | None:
        """Equal outcomes are no reason to replace a group whose turns were rewarded unequally."""
        reason = super().accepts(group, run)
        if reason is not None and any(own.any() for own in self._of_turns(group)):
            return None
        return reason

    @property
    def rejects(self) -> bool:
        return self.dynamic_sampling

    def advantages(
        self, groups: Sequence[RolloutGroup], run: RunSettings, inputs: AdvantageInputs
    ) -> Sequence[Advantages]:
        outcomes = super().advantages(groups, run, inputs)
        return [
            self._by_turn(group, np.asarray(own))
            for group, own in zip(groups, outcomes, strict=True)
        ]

    def _by_turn(self, group: RolloutGroup, outcomes: np.ndarray) -> Advantages:
        if all(c.episode is None or not c.episode.turn_rewards for c in group.completions):
            return outcomes
        credited = []
        pairs = zip(group.completions, outcomes.tolist(), self._of_turns(group), strict=True)
        for completion, outcome, of_turns in pairs:
            own = np.full(len(completion.token_ids), outcome)
            if completion.episode is not None:
                for turn, advantage in zip(completion.episode.turns, of_turns, strict=False):
                    own[turn.sampled : turn.end] += self.turn_coef * advantage
            credited.append(own)
        return credited

    def _of_turns(self, group: RolloutGroup) -> list[np.ndarray]:
        """Of each completion float64 [K], what its turns are credited with, normalised in the
        group; empty where it has no turn rewards."""
        episodes = [completion.episode for completion in group.completions]
        rewards = [np.array(() if e is None else e.turn_rewards, np.float64) for e in episodes]
        mode: Literal["group_std", "group_mean"]
        mode = "group_mean" if self.advantage == "group_mean" else "group_std"
        if self.credit == "branch":
            return _of_branches(episodes, rewards, mode)
        advantages = [np.zeros(len(own)) for own in rewards]
        for k in range(max(map(len, rewards), default=0)):
            those = [i for i, own in enumerate(rewards) if k < len(own)]
            if len(those) < 2:
                continue
            normalised = group_advantages(np.array([rewards[i][k] for i in those]), mode)
            for i, advantage in zip(those, normalised, strict=True):
                advantages[i][k] = advantage
        return advantages


def _of_branches(
    episodes: Sequence[Episode | None],
    rewards: Sequence[np.ndarray],
    mode: Literal["group_std", "group_mean"],
) -> list[np.ndarray]:
    """Of each episode float64 [K], the mean over a turn's branches of their normalised rewards."""
    parents = [
        [] if episode is None else [turn.parent for turn in episode.turns[: len(own)]]
        for episode, own in zip(episodes, rewards, strict=True)
    ]
    ends = [sorted(set(range(len(of))) - set(of)) for of in parents]  # of branches
    sums: list[float] = []
    for own, of_turns, last in zip(rewards, parents, ends, strict=True):
        so_far = own.copy()
        for turn, parent in enumerate(of_turns):  # parents stand before children
            if parent is not None:
                so_far[turn] += so_far[parent]
        sums += so_far[last].tolist()
    advantages = [np.zeros(len(own)) for own in rewards]
    if len(sums) < 2:
        return advantages
    normalised = iter(group_advantages(np.array(sums), mode))
    for made, of_turns, last in zip(advantages, parents, ends, strict=True):
        num_branches = np.zeros(len(made))
        num_branches[last] = 1
        made[last] = [next(normalised) for _ in last]
        for turn in reversed(range(len(made))):
            if (parent := of_turns[turn]) is not None:
                made[parent] += made[turn]
                num_branches[parent] += num_branches[turn]
        made /= num_branches
    return advantages
