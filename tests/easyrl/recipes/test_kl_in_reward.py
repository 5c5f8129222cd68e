"""The KL as a reward of each token, by k1, k2 or k3, in recipes that put it in advantages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import easyrl.recipes
from easyrl.config.file import load_config
from easyrl.recipes import (
    GRPO,
    GSPO,
    PPO,
    RLOO,
    AdvantageInputs,
    Models,
    ReinforcePP,
    ReinforcePPBaseline,
)
from easyrl.recipes.estimators import kl_estimate
from easyrl.recipes.groups import group_statistics, trained_groups
from easyrl.recipes.loading import load_recipe, notices
from easyrl.schema import GroupOutputs, RolloutGroup
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package
from tests.easyrl.recipes.ppo_formulas import ValuedBatches, row_of, valued_batches
from tests.easyrl.recipes.transcriptions import packed
from tests.recipes import run_settings
from tests.tiny_models import random_group

RUN = run_settings()
MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
rewards: [{name: exact}, {name: format}]
"""
ESTIMATES: dict[str, Callable[[float], float]] = {  # of log policy - log reference
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.expm1(-d) + d,
}


# ---- PPO -----------------------------------------------------------------------------------------


def check_ppo(recipes: ModuleType, estimator: str, data: ValuedBatches) -> None:
    """Advantages of gamma = lambda = 1: a response's reward, less the KL from a token on, less the
    value there. Raises ``AssertionError``."""
    recipe = recipes.PPO(
        whiten=False,
        gae_lambda=1.0,
        kl_in_reward_coef=0.3,
        kl_in_reward_estimator=estimator,
    )
    row, b = row_of(recipes, recipe, data), data.batches
    log_ratio = (b.old.float().double() - b.reference.float().double()).numpy()
    mask, expected = b.mask.numpy(), np.zeros(b.mask.shape)
    for place in np.ndindex(*mask.shape[:3]):
        tokens = np.flatnonzero(mask[place])
        for t in tokens:
            later = sum(ESTIMATES[estimator](log_ratio[(*place, u)]) for u in tokens if u >= t)
            at = (*place, t)
            expected[at] = float(b.rewards[place]) - 0.3 * later - float(data.old_values[at])
    wanted = torch.from_numpy(expected)[row.at]
    torch.testing.assert_close(row.terms.advantages, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_ppo_s_rewards_have_the_estimator(estimator: str) -> None:
    check_ppo(easyrl.recipes, estimator, valued_batches(1000))


@cache
def few() -> ValuedBatches:
    return valued_batches(20, seed=3)


def check(recipes: ModuleType) -> None:
    for estimator in ("k2", "k3"):
        check_ppo(recipes, estimator, few())


def test_a_copy_without_a_mutation_passes() -> None:
    with copied_package() as copy:
        check(copy)


MUTATIONS = [
    Mutation("ppo.py", "log_ratio, self.kl_in_reward_estimator", "log_ratio, 'k1'"),
    Mutation("ppo.py", "own -= self.kl_in_reward_coef *", "own += self.kl_in_reward_coef *"),
    Mutation("ppo.py", "completion.logprobs[tokens] - reference", "reference"),
    Mutation("estimators.py", "0.5 * difference.square()", "difference.square()"),
    Mutation("estimators.py", "torch.exp(-difference) - 1", "torch.exp(difference) - 1"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check)


# ---- REINFORCE++ ---------------------------------------------------------------------------------


def made_group(index: int, lengths: list[int]) -> tuple[RolloutGroup, GroupOutputs]:
    rng = np.random.default_rng(index)
    group = random_group(rng, 2, lengths, index=index)
    own = [c.logprobs + rng.normal(0, 0.3, len(c.token_ids)) for c in group.completions]
    return group, GroupOutputs((), tuple(each.astype(np.float32) for each in own))


@pytest.mark.parametrize("cls", [ReinforcePP, ReinforcePPBaseline])
def test_advantages_are_normalised_over_the_tokens_of_all_ranks(cls: type[ReinforcePP]) -> None:
    """Two ranks with a group each have what one has with both."""
    recipe = cls(kl_in_reward_coef=0.5)
    pairs = [made_group(0, [3, 5]), made_group(1, [1, 9])]
    groups, said = [group for group, _ in pairs], [own for _, own in pairs]
    statistics = [group_statistics(recipe, RUN, *pair) for pair in pairs]
    together = trained_groups(recipe, RUN, groups, statistics, said)
    alone = [trained_groups(recipe, RUN, [g], statistics, [s])[0] for g, s in pairs]
    values = []
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one.responses, other.responses, strict=True):
            np.testing.assert_array_equal(a.advantages, b.advantages)
            values.append(a.advantages)
    tokens = np.concatenate(values)
    assert len(tokens) == 18 and np.ptp(values[-1]) > 0
    assert abs(tokens.mean()) < 1e-12 and tokens.std() == pytest.approx(1, abs=1e-6)


def test_one_token_has_no_advantage_and_none_is_no_error() -> None:
    recipe = ReinforcePP(kl_in_reward_coef=0.5)
    group, said = made_group(0, [1, 1])
    chosen = type("First", (ReinforcePP,), {"select": lambda self, group, run: [0]})
    alone = chosen(kl_in_reward_coef=0.5)
    statistics = [group_statistics(alone, RUN, group, said)]
    (trained,) = trained_groups(alone, RUN, [group], statistics, [said])
    assert [r.advantages.tolist() for r in trained.responses] == [[0.0]]
    assert recipe.advantages([], RUN, AdvantageInputs(())) == []


def test_what_reinforce_pp_asks_for() -> None:
    with_kl, without = ReinforcePP(kl_in_reward_coef=0.1), ReinforcePP()
    assert with_kl.before_advantages == Models(reference=True)
    assert without.before_advantages == Models() and not without.needs.reference
    assert with_kl.needs == Models(reference=True, old_policy=True)
    assert with_kl.span == without.span == "token"  # the KL is in the advantages
    assert without.advantage_only
    assert ReinforcePPBaseline().before_advantages == Models()  # its KL is a loss


def test_the_loss_does_not_add_the_kl_again() -> None:
    recipe = ReinforcePP(kl_in_reward_coef=0.1)
    data = valued_batches(5)
    row = packed(easyrl.recipes, recipe, data.batches)
    logprobs, entropy = data.batches.policy[row.places], data.batches.entropy[row.places]
    plain = ReinforcePP().loss(logprobs, entropy, row.terms)
    torch.testing.assert_close(recipe.loss(logprobs, entropy, row.terms), plain, rtol=0, atol=0)


# ---- the estimator -------------------------------------------------------------------------------


def test_k1_as_a_reward_has_the_policy_gradient_of_the_reverse_kl() -> None:
    """Over all outcomes: ``E[k grad log policy]``; k2's and k3's are others."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    weights = logp.exp().detach()
    (exact,) = torch.autograd.grad(
        (logp.exp() * (logp - reference)).sum(), logits, retain_graph=True
    )
    far = {}
    for estimator in ESTIMATES:
        kl = kl_estimate(logp.detach(), reference, estimator)  # type: ignore[arg-type]
        (got,) = torch.autograd.grad((weights * kl * logp).sum(), logits, retain_graph=True)
        far[estimator] = float((got - exact).norm() / exact.norm())
    assert far["k1"] < 1e-12 and far["k2"] > 0.1 and far["k3"] > 0.1


@pytest.mark.parametrize("cls", [GRPO, PPO, RLOO, ReinforcePP])
def test_the_default_is_k1(cls: type) -> None:
    assert cls().kl_in_reward_estimator == "k1"


def said_at_start(folder: Path, *overrides: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, overrides)
    return notices(config, load_recipe(config))


@pytest.mark.parametrize(
    "recipe",
    ["name: grpo", "name: rloo, kl_in_reward_coef: 0.0", "name: ppo", "name: reinforce_pp"],
)
def test_an_estimator_of_nothing_is_said(tmp_path: Path, recipe: str) -> None:
    said = said_at_start(tmp_path, f"recipe={{{recipe}, kl_in_reward_estimator: k3}}")
    wanted = "recipe.kl_in_reward_estimator: has no effect without a KL in the reward"
    assert [each for each in said if each.startswith(wanted)]
    acting = recipe.replace(", kl_in_reward_coef: 0.0", "") + ", kl_in_reward_coef: 0.1"
    said = said_at_start(tmp_path, f"recipe={{{acting}, kl_in_reward_estimator: k3}}")
    assert not [each for each in said if each.startswith(wanted)]


def test_gspo_refuses_it_whatever_the_estimator() -> None:
    (problem,) = GSPO(kl_in_reward_coef=0.1, kl_in_reward_estimator="k3").problems()
    assert problem.startswith("kl_in_reward_coef: gives each token an advantage of its own")
