"""Losses and gradients against TRL's own trainers' loss methods, called with given numbers.

TRL is installed apart, by ``make test-peers``: without it these tests are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import easyrl.recipes
from easyrl.recipes.loading import BUILT_IN
from tests.easyrl.recipes.transcriptions import (
    MAX_TOKENS,
    NUM_GENERATIONS,
    Batches,
    packed,
    random_batches,
)
from tests.peers import peer

NUM_PROMPTS = 60
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}

# recipe, its settings, what TRL calls the same
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", {"overlong_buffer": 0.0}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (
        "gspo",
        {},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "two_sided": (
        "two_sided",
        {"entropy_coef": 0.0},
        {"loss_type": "dapo", "delta": 4.0, "beta": 0.001},
    ),
    "reinforce_pp": ("reinforce_pp", {}, {"loss_type": "dapo"}),
    "gdpo": ("gdpo", {}, {"loss_type": "grpo"}),
}


@pytest.fixture(scope="module")
def batches() -> Batches:
    """One optimizer step."""
    return random_batches(1, seed=4, num_prompts=NUM_PROMPTS)


def ours(name: str, settings: Mapping[str, Any], batches: Batches) -> tuple[Tensor, Tensor]:
    """The loss, and advantages [P G] for TRL to use as they are."""
    recipe = BUILT_IN[name](**settings)
    row = packed(easyrl.recipes, recipe, batches)
    advantages = torch.zeros_like(batches.rewards)
    advantages[row.places[:3]] = row.terms.advantages
    loss = recipe.loss(row.logprobs, row.entropy, row.terms).sum() / row.denominators[0]
    return loss, advantages.flatten()


def trainer(batches: Batches, **settings: Any) -> Any:
    """What TRL's ``_compute_loss`` reads of its trainer."""
    logprobs, entropy = batches.policy.flatten(0, 2), batches.entropy.flatten(0, 2)
    return SimpleNamespace(
        **{"beta": 0.0} | CLIP | {k: v for k, v in settings.items() if k != "delta"},
        args=SimpleNamespace(
            delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy.detach(), None),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=False,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def inputs(batches: Batches, advantages: Tensor) -> dict[str, Tensor]:
    mask = batches.mask.flatten(0, 2).long()
    ids = torch.zeros_like(mask)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": batches.old.flatten(0, 2),
        "ref_per_token_logps": batches.reference.flatten(0, 2),
        "num_items_in_batch": mask.sum(),
    }


def assert_same(batches: Batches, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, batches.policy)[0] for loss in (got, expected)]
    assert gradients[1].abs().sum() > 0
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trl_s(batches: Batches, name: str) -> None:
    trl = peer("trl.trainer.grpo_trainer")
    recipe, settings, theirs = CASES[name]
    got, advantages = ours(recipe, settings, batches)
    fake = trainer(batches, **theirs)
    expected = trl.GRPOTrainer._compute_loss(fake, fake.model, inputs(batches, advantages))
    assert_same(batches, got, expected)
    logged = fake._metrics["train"]
    clipped = [v for key, (v,) in logged.items() if key.endswith(("low_mean", "high_mean"))]
    clipped += logged["cispo_clip_ratio"]
    assert clipped and min(clipped) > 0  # the comparison is about clipping too


def test_rloo_is_trl_s_where_the_policy_is_the_old_one(batches: Batches) -> None:
    """TRL's RLOO clips a ratio of sequences; at ratio 1 its gradient is REINFORCE's."""
    trl = peer("trl.trainer.rloo_trainer")
    loss, advantages = ours("rloo", {"kl_in_reward_coef": 0.0}, batches)
    fake = trainer(batches)
    logps = (batches.policy * batches.mask).sum(-1).flatten().detach()
    given = inputs(batches, advantages) | {"old_logps": logps}
    expected = trl.RLOOTrainer._compute_loss(fake, fake.model, given)
    gradients = [torch.autograd.grad(x, batches.policy)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_another_setting_is_not_trl_s(batches: Batches) -> None:
    trl = peer("trl.trainer.grpo_trainer")
    got, advantages = ours("dapo", {"overlong_buffer": 0.0, "clip_eps_high": 0.3}, batches)
    fake = trainer(batches, **CASES["dapo"][2])
    expected = trl.GRPOTrainer._compute_loss(fake, fake.model, inputs(batches, advantages))
    with pytest.raises(AssertionError):
        assert_same(batches, got, expected)
    assert len(advantages) == NUM_PROMPTS * NUM_GENERATIONS
