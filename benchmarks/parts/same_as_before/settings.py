"""The settings in which two checkouts train, written out for each in its own configuration's form.

Every value that decides a number is given: a default that changes must not pass for a change of the
arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_BATCHES = 3
BATCH, GENERATIONS, PROMPT_TOKENS, MAX_TOKENS = 8, 4, 12, 12


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: data-parallel ranks, optimizer steps on a batch, ZeRO stage."""

    ranks: int
    updates: int
    zero: int

    def __str__(self) -> str:
        return f"ranks={self.ranks} updates={self.updates} zero={self.zero}"

    @property
    def folder(self) -> str:
        """A name for files, and for the run."""
        return f"ranks{self.ranks}-updates{self.updates}-zero{self.zero}"


SETTINGS = [Setting(*values) for values in itertools.product((1, 2), (1, 2), (0, 2))]
QUICK = [SETTINGS[0], SETTINGS[-1]]


def select(parts: list[str]) -> list[Setting]:
    """The settings whose name has all of ``parts``, such as ``ranks=2`` and ``zero=0``."""
    return [setting for setting in SETTINGS if {*parts} <= {*str(setting).split()}]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is made of besides its setting."""

    model: Path
    prompts: Path
    rewards: Path  # a file with ``reward_func``
    url: str  # of the inference server


def base_form(setting: Setting, inputs: Inputs, run_dir: Path) -> dict[str, Any]:
    """The configuration as commit e7cfbd6 reads it."""
    # Values that this form demands with one update, where the ratio is 1 and nothing is clipped;
    # with two the clips lie so close that some ratios of the second are outside.
    low, high = (0.2, 0.2) if setting.updates == 1 else (0.02, 0.03)
    return {
        "run": {
            "name": setting.folder,
            "output_dir": str(run_dir),
            "seed": 0,
            "mode": "async",
            "determinism": "strict",
            "trackers": [],
            "console": False,
        },
        "model": {
            "path": str(inputs.model),
            "dtype": "fp32",
            "attention": "auto",
            "activation_checkpointing": "none",
            "logprob_chunk_size": 32,
            "logprob_backward": "auto",
        },
        "data": {
            "files": [str(inputs.prompts)],
            "apply_chat_template": False,
            "max_prompt_tokens": PROMPT_TOKENS,
            "shuffle": True,
            "epochs": 1,
        },
        "rollout": {
            "num_generations": GENERATIONS,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "truncated": "keep",
        },
        "inference": {"endpoints": [inputs.url]},
        "rewards": [{"file": str(inputs.rewards), "function": "reward_func", "weight": 1.0}],
        "scoring": {"num_workers": 1},
        "objective": {
            "advantage": "group_std",
            "aggregation": "token",
            "clip_eps_low": low,
            "clip_eps_high": high,
            "kl_coef": 0.05,
            "kl_estimator": "k3",
            "kl_in_reward_coef": 0.0,
            "entropy_coef": 0.01,
            "old_policy": "auto",
            "importance_correction": "none",
            "importance_cap": 2.0,
            "shuffle_rewards": False,
        },
        "trainer": {
            "batch_size": BATCH,
            "updates_per_batch": setting.updates,
            "max_steps": NUM_BATCHES * setting.updates,
            "packing": "prompt",
            "max_tokens_per_micro_batch": 100,
            "learning_rate": 1e-2,
            "lr_schedule": "cosine",
            "warmup_steps": 0,
            "min_lr_ratio": 0.1,
            "weight_decay": 0.01,
            "adam_betas": [0.9, 0.95],
            "adam_eps": 1e-8,
            "max_grad_norm": 0.5,
            "zero_stage": setting.zero,
            "offload_optimizer": False,
            "offload_reference": False,
        },
        "checkpoint": {
            "every_steps": setting.updates,
            "keep": 10 * NUM_BATCHES,
            "export_at_end": False,
        },
    }


def form_of(checkout: Path) -> Callable[[Setting, Inputs, Path], dict[str, Any]]:
    """That which the configuration of a checkout has."""
    return present_form if (checkout / "easyrl" / "recipes").is_dir() else base_form


# ==== The form of the present tree ====================================================
# To be changed here, and nowhere else in this benchmark, where a key is renamed.


def present_form(setting: Setting, inputs: Inputs, run_dir: Path) -> dict[str, Any]:
    """The same values as the present tree reads them."""
    form = base_form(setting, inputs, run_dir)
    objective = form.pop("objective")
    form["recipe"] = {"name": "grpo", "mask_truncated": False} | {
        key: value
        for key, value in objective.items()
        if key not in ("old_policy", "shuffle_rewards")
    }
    form["trainer"]["old_policy"] = objective["old_policy"]
    form["scoring"] |= {"shuffle_rewards": objective["shuffle_rewards"], "truncated_reward": None}
    del form["rollout"]["truncated"]
    return form


# ======================================================================================
