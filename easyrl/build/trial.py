"""What can be tried before the run's model is loaded: rewards and recipe, the attention."""

from __future__ import annotations

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from easyrl.build.inference import Scoring
from easyrl.build.recipe import group_functions
from easyrl.config import Config, ConfigError
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.kernels.attention.attention_check import CheckedAttention
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.recipes.loading import load_recipe, run_settings
from easyrl.recipes.trial import try_recipe
from easyrl.rewards.trial import try_rewards
from easyrl.schema import Completion, Prompt, RolloutGroup, Score, VersionSpan


def try_attention(config: Config) -> None:
    """Runs the attention that ``model.attention`` names once, on this rank's device.

    Raises ``ConfigError`` if it cannot be run there, before the model is loaded.
    """
    wanted = config.model.attention
    if wanted in ("auto", "own"):
        return
    device = torch.device(get_accelerator().current_device_name())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.model.dtype]
    row = dummy_micro_batch()
    heads = torch.randn(1, 2, row.num_tokens, 64, device=device, dtype=dtype)
    try:
        CheckedAttention(wanted)(heads, heads, heads, SegmentLayout(row.segments))
    except (RuntimeError, ImportError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"model.attention: {wanted} cannot be used on {device} ({said:.200}); use auto"
        ) from error


def try_user_code(config: Config, prompt: Prompt, scoring: Scoring) -> None:
    """Calls the functions of ``rewards[i].file`` and the methods of ``recipe.file`` once.

    Rewards are not tried where their errors do not end a run (``scoring.on_reward_error``). Raises
    ``ConfigError`` naming file and line.
    """
    group = _made_up_group(config, prompt)
    if config.scoring.on_reward_error == "fail":
        scoring.thread.run(try_rewards(config.rewards, scoring.workers, prompt, group.completions))
    if config.recipe.file is not None:
        recipe, run = load_recipe(config), run_settings(config)
        try_recipe(recipe, config.recipe.file, run, group, group_functions(config).pack)


def _made_up_group(config: Config, prompt: Prompt) -> RolloutGroup:
    """Answers that repeat the prompt, of different lengths, scored 0 and 1 in turn."""
    completions, scores = [], []
    for sample in range(config.rollout.num_generations):
        longest = min(len(prompt.token_ids), config.rollout.max_tokens)
        token_ids = prompt.token_ids[: max(1, longest - sample % 2)]
        completions.append(
            Completion(
                token_ids=token_ids,
                logprobs=np.full(len(token_ids), -1.0, np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan("trial:0:0", 0, len(token_ids)),),
                endpoint="http://trial",
                loss_mask=np.ones(len(token_ids), bool),
            )
        )
        components = {reward.label: float(sample % 2) for reward in config.rewards}
        total = sum(reward.weight * components[reward.label] for reward in config.rewards)
        scores.append(Score(total, components))
    return RolloutGroup(prompt, tuple(completions), tuple(scores), "trial:0:0", 0.0, 1.0)
