"""Online DPO and RPO: which pair a group gives, what a group without one does, TRL's online DPO.

That the losses are the published equations: ``test_transcriptions.py``, ``test_mutations.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import easyrl.recipes
from easyrl.recipes import DPO, RPO, OnlineDPO, Recipe, SampledPairs
from easyrl.recipes.groups import trained_group, trained_groups
from easyrl.schema import RolloutGroup, Score
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package
from tests.easyrl.recipes.test_record_recipes import Padded, assert_same, packed_loss, padded
from tests.easyrl.recipes.transcriptions import Packed, packed, random_batches
from tests.peers import peer
from tests.recipes import run_settings
from tests.tiny_models import random_group

RUN = run_settings()
BOTH = pytest.mark.parametrize("recipe", [OnlineDPO(), RPO()], ids=["online_dpo", "rpo"])


def group(rewards: Sequence[float], index: int = 0) -> RolloutGroup:
    made = random_group(np.random.default_rng(index), 3, [4] * len(rewards), index=index)
    return replace(made, scores=tuple(Score(reward, {}) for reward in rewards))


# ---- the pair ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("rewards", "worst", "best"),
    [
        ([0.5, 2.0, -1.0, 1.0], 2, 1),
        ([0.0, 1.0], 0, 1),
        ([1.0, 0.0], 1, 0),
        ([1.0, 0.0, 1.0, 0.0], 1, 2),  # of those that score alike the first is the worse
    ],
)
def test_best_and_worst_are_the_pair(
    recipe: SampledPairs, rewards: list[float], worst: int, best: int
) -> None:
    made = group(rewards)
    assert recipe.select(made, RUN) == [worst, best]
    (advantages,) = recipe.advantages([made], RUN, None)  # type: ignore[arg-type]
    trained = trained_group(recipe, made, advantages, RUN)
    assert {response.sample for response in trained.responses} == {worst, best}
    margin = max(rewards) - min(rewards)
    for response in trained.responses:
        wanted = margin if response.sample == best else -margin
        assert response.advantages.tolist() == [wanted] * len(response.tokens)
    assert recipe.accepts(made, RUN) is None


@BOTH
def test_a_group_of_equal_rewards_has_no_pair(recipe: SampledPairs) -> None:
    made = group([1.0, 1.0, 1.0])
    (trained,) = trained_groups(recipe, RUN, [made])
    assert not trained.has_signal and recipe.advantage_only  # so that it is not run
    assert recipe.denominator([made, made], RUN) == 2.0  # it counts, as in every recipe
    assert not recipe.rejects and recipe.accepts(made, RUN) is None
    picky = replace(recipe, dynamic_sampling=True)
    assert picky.rejects and picky.accepts(made, RUN) == "all rewards are equal"
    assert picky.accepts(group([1.0, 1.0, 0.0]), RUN) is None


@BOTH
def test_its_loss_and_gradient_are_zero_where_it_is_run(recipe: SampledPairs) -> None:
    """Each endpoint keeps a group whose log-probabilities are compared."""
    row = in_one_row(recipe, seed=3)
    flat = row.terms.advantages == 0
    assert 0 < flat.sum() < len(flat)
    losses = recipe.loss(row.logprobs, row.entropy, row.terms)
    without_pair = flat.new_zeros(len(losses)).index_put((row.terms.group_index,), flat)
    assert (losses[without_pair] == 0).all() and (losses[~without_pair] > 0).all()
    (gradient,) = torch.autograd.grad(losses.sum(), row.logprobs)
    assert (gradient[flat] == 0).all() and (gradient[~flat] != 0).all()


def in_one_row(recipe: Recipe, seed: int) -> Packed:
    return packed(easyrl.recipes, recipe, random_batches(1, seed=seed, num_prompts=60))


def test_another_choice_of_the_pair_is_a_method() -> None:
    class Neighbours(OnlineDPO):
        def select(self, group: RolloutGroup, run: object) -> Sequence[int]:
            order = np.argsort(group.rewards, kind="stable")
            return [int(order[-2]), int(order[-1])]

    (trained,) = trained_groups(Neighbours(), RUN, [group([0.0, 3.0, 1.0, 2.0])])
    got = {response.sample: response.advantages[0] for response in trained.responses}
    assert got == {3: -1.0, 1: 1.0}


# ---- the losses ----------------------------------------------------------------------------------


def test_online_dpo_is_dpo_on_its_pairs() -> None:
    batch = padded(11, [100])
    chosen_first = [replace(g, scores=(Score(1.0, {}), Score(0.0, {}))) for g in batch.groups]
    expected = packed_loss(easyrl.recipes, DPO(beta=0.3), batch)
    online = replace(batch, groups=chosen_first)
    assert_same(batch, packed_loss(easyrl.recipes, OnlineDPO(beta=0.3), online), expected)


def test_rpo_rests_where_the_margins_are_equal() -> None:
    recipe = RPO(reward_scale=2.0)
    gaps = torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64)
    margins = (2.0 * gaps).requires_grad_()
    losses = recipe.pair_losses(margins, gaps)
    (gradient,) = torch.autograd.grad(losses.sum(), margins)
    torch.testing.assert_close(losses, torch.zeros_like(gaps), rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient, torch.zeros_like(gaps), rtol=0, atol=1e-15)
    for away in (-1e-3, 1e-3):
        assert (recipe.pair_losses(2.0 * gaps + away, gaps) > 0).all()


def test_rpo_s_gradient_is_the_difference_of_the_preferences() -> None:
    """sigma(a) - sigma(b): with a near 0, as by a tiny beta, REINFORCE with a bounded advantage."""
    gaps = torch.linspace(0.1, 4.0, 9, dtype=torch.float64)
    margins = torch.linspace(-3.0, 3.0, 9, dtype=torch.float64).requires_grad_()
    losses = RPO(reward_scale=1.5).pair_losses(margins, gaps)
    (gradient,) = torch.autograd.grad(losses.sum(), margins)
    expected = torch.sigmoid(margins.detach()) - torch.sigmoid(1.5 * gaps)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("margin", [-1e4, 0.0, 1e4])
def test_rpo_is_finite_far_from_what_is_wanted(margin: float) -> None:
    margins = torch.tensor([margin], requires_grad=True)
    losses = RPO().pair_losses(margins, torch.tensor([100.0]))
    (gradient,) = torch.autograd.grad(losses.sum(), margins)
    assert torch.isfinite(losses).all() and torch.isfinite(gradient).all()


# ---- what is reported ----------------------------------------------------------------------------


def check_metrics(recipes: ModuleType) -> None:
    """Means over pairs alone, also beside groups that have none."""
    batches = random_batches(1, seed=5, num_prompts=300)
    recipe = recipes.RPO(beta=0.2, reward_scale=1.5)
    row = packed(recipes, recipe, batches)
    said = recipe.metrics(row.logprobs.detach(), row.entropy.detach(), row.terms)
    rewards = batches.rewards[0]  # [P, G]
    log_ratios = (batches.mask * (batches.policy - batches.reference)).sum(-1)[0].detach()
    chosen, rejected, gaps = [], [], []
    for own, ratios in zip(rewards.tolist(), log_ratios.tolist(), strict=True):
        if (gap := max(own) - min(own)) > 0:
            best, worst = len(own) - 1 - own[::-1].index(max(own)), own.index(min(own))
            chosen.append(0.2 * ratios[best])
            rejected.append(0.2 * ratios[worst])
            gaps.append(gap)
    margins = np.array(chosen) - np.array(rejected)
    assert 0 < len(gaps) < len(rewards) and 0 < (margins > 0).mean() < 1
    expected = {
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
        "chosen_reward": np.mean(chosen),
        "rejected_reward": np.mean(rejected),
        "wanted_margin": 1.5 * np.mean(gaps),
    }
    for name, value in expected.items():
        assert float(said[f"{name}_num"]) == len(gaps)
        assert float(said[f"{name}_sum"]) / len(gaps) == pytest.approx(value, rel=1e-9)


def test_what_is_reported_is_of_pairs() -> None:
    with copied_package() as copy:
        check_metrics(copy)


METRIC_MUTATIONS = [
    Mutation("preference.py", "is_pair.to(margins).sum()", "margins.new_tensor(len(margins))"),
    Mutation("preference.py", "is_pair = reward_margins > 0", "is_pair = reward_margins >= 0"),
    Mutation("rpo.py", "self.reward_scale * reward_margins.sum()", "reward_margins.sum()"),
    Mutation("rpo.py", 'said["margin_num"]', "reward_margins.new_tensor(len(reward_margins))"),
]


@pytest.mark.parametrize("mutation", METRIC_MUTATIONS, ids=str)
def test_a_mutation_of_what_is_reported_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_metrics)


# ---- TRL -----------------------------------------------------------------------------------------


def trl_loss(batch: Padded, beta: float) -> Tensor:
    """Of TRL's own ``OnlineDPOTrainer.training_step``, whose samples and rewards are given."""
    trl = peer("trl.experimental.online_dpo.online_dpo_trainer")

    def stacked(values: Tensor) -> Tensor:  # all first responses, then all second ones
        return torch.cat([values[:, 0], values[:, 1]])

    rewards = stacked(torch.tensor(np.array([g.rewards for g in batch.groups])))
    mask = stacked(batch.mask).long()
    ids = torch.zeros_like(mask)
    model, reference = SimpleNamespace(train=lambda: None), object()
    losses: list[Tensor] = []
    fake = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type="sigmoid",
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        _generate=lambda *_: (ids[:, :1], torch.ones_like(ids[:, :1]), ids, mask, None),
        _forward=lambda which, *_: stacked(batch.reference if which is reference else batch.policy),
        _calculate_rewards_from_functions=lambda **_: rewards,
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, backward=losses.append),
        eos_token_ids=[0],
        ref_model=reference,
        reward_funcs=[None],
        stats=defaultdict(list),
        beta=beta,
    )
    trl.OnlineDPOTrainer.training_step(fake, model, {"prompt": ["a prompt"] * len(batch.groups)})
    return losses[0]


def with_rewards(batch: Padded) -> Padded:
    """Two different ones in each group: of equal ones TRL makes a pair all the same."""
    rng = np.random.default_rng(0)
    groups = []
    for made in batch.groups:
        rewards = rng.permutation([0.0, 0.5, 1.0])[:2].tolist()
        groups.append(replace(made, scores=tuple(Score(reward, {}) for reward in rewards)))
    return replace(batch, groups=groups)


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_pairs_loss_and_gradient_are_trl_s(beta: float) -> None:
    batch = with_rewards(padded(9, [200]))
    expected = trl_loss(batch, beta)[None]  # of the only batch
    assert_same(batch, packed_loss(easyrl.recipes, OnlineDPO(beta=beta), batch), expected)
    with pytest.raises(AssertionError):
        assert_same(batch, packed_loss(easyrl.recipes, OnlineDPO(beta=1.1 * beta), batch), expected)
