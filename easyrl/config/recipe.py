"""Section ``recipe`` as loaded, and the new names of keys that have moved.

The recipe's own keys are checked by its class (``easyrl.recipes.loading``), which needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict

from easyrl.config.base import FilePath, Section


class RecipeConfig(Section):
    """The RL algorithm: a built-in by ``name``, or the class ``name`` of a user's ``file``.

    All other keys are the recipe's own fields.
    """

    model_config = ConfigDict(extra="allow")

    name: str = "grpo"  # easyrl recipes lists the built-in ones, and published settings of them
    file: FilePath | None = None  # Python file with a recipe of one's own; name is its class

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe's own keys."""
        return dict(self.model_extra or {})


_OWN_KEYS = """
    advantage aggregation clip_eps_low clip_eps_high kl_coef kl_estimator kl_in_reward_coef
    entropy_coef importance_correction importance_cap
"""
MOVED = {
    "objective": {
        "old_policy": "trainer.old_policy",
        "shuffle_rewards": "scoring.shuffle_rewards",
        **{key: f"recipe.{key}" for key in _OWN_KEYS.split()},
    },
    "rollout": {
        "truncated": "recipe.mask_truncated=true (truncated: mask) or scoring.truncated_reward "
        "(truncated: mark)",
        "truncated_reward": "scoring.truncated_reward",
    },
}


def moved_keys(values: Mapping[str, Any]) -> list[str]:
    """A line for each key of ``values``, a configuration as loaded, that has another name now."""
    problems = []
    for section, moved in MOVED.items():
        given = values.get(section)
        if not isinstance(given, Mapping):
            continue
        for key in given:
            if key in moved:
                problems.append(f"  {section}.{key}: is now {moved[key]}")
            elif section == "objective":
                problems.append(f"  {section}.{key}: unknown key")
    if "objective" in values:
        problems.append(
            "  objective: is no section any more; see docs/recipes.md. The defaults of recipe: "
            "grpo are its paper's; the former ones are aggregation: token and kl_coef: 0.0"
        )
    return problems
