"""Advantages, losses and gradients against verl's own functions, called with given numbers in fp64.

Of verl 0.9.1 the files ``trainer/ppo/core_algos.py`` and ``utils/torch_functional.py`` are loaded
from where it is installed (``make test-peers``, else these tests are skipped); what else they
import needs Ray and tensordict, is not used by what is called here, and is stubs.

verl's options are set to our numbers where the formula is the same: the constant beside a deviation
(its 1e-6, ours and TRL's 1e-4), the number of all responses as divisor (``global_batch_size``, as
its trainer does), no dual clip where we have none (verl's PPO loss always has one). What is left
is said at each tolerance.

Not compared, because the formula differs:

- PF-PPO: verl draws as many responses as the batch has anew, with replacement, by weights of all
  rewards of the batch; ours takes two of each group by their ranks. All else of it is PPO's.
- GDPO's second normalisation: verl's is over the batch's tokens, so that a long response counts
  more, ours (and TRL's) over its responses. Compared where each response has one token.
- REINFORCE++-baseline with a KL in the reward: verl takes the group's mean of rewards with their
  whole KL in them, ours that of the rewards, and from each token the KL from there on.
- k3 of a token above 10, which verl cuts there.
- RLOO's KL in a group with a response without a trained token: verl's baseline counts its KL as 0,
  ours leaves it out. And RLOO's loss is REINFORCE's here; verl's trainer has PPO's, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

import easyrl.recipes
from tests.easyrl.recipes.mutations import Mutation, assert_killed
from tests.easyrl.recipes.ppo_formulas import ValuedBatches, row_of, valued_batches
from tests.easyrl.recipes.transcriptions import (
    MAX_TOKENS,
    NUM_GENERATIONS,
    NUM_PROMPTS,
    WEIGHTS,
    Batches,
    packed,
    random_batches,
    to_go,
)
from tests.peers import peer_folder

NUM_BATCHES = 1000
RESPONSES = NUM_PROMPTS * NUM_GENERATIONS
PROMPTS = np.repeat(np.arange(NUM_PROMPTS), NUM_GENERATIONS)  # of each response
PACKAGES = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.utils", "verl.workers")
UNUSED = ("as_torch_index", "group_mean_std")  # that core_algos imports from verl.utils
NEVER = 1e12  # a dual clip that does not act

EXACT = {"rtol": 1e-12, "atol": 1e-12}
OF_FLOATS = {"rtol": 1e-6, "atol": 1e-6}  # our advantages of a group are float32
WHITENED = {"rtol": 1e-6, "atol": 1e-6}  # verl adds 1e-8 to a variance, our REINFORCE++ to its root
WHITENED_PPO = {"rtol": 1e-8, "atol": 1e-8}  # verl's mean has 1e-8 added to the number of tokens
OF_RESPONSES = {"rtol": 2e-8, "atol": 2e-7}  # verl adds 1e-8 to a response's number of tokens


@pytest.fixture(scope="module")
def verl() -> Any:
    """Its ``core_algos``."""
    folder = peer_folder("verl")
    made = {name: ModuleType(name) for name in PACKAGES}
    for name, module in made.items():  # packages, but without what their __init__ imports
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    stubs: dict[str, dict[str, Any]] = {
        "tensordict": {"TensorDict": object},
        "verl.utils": dict.fromkeys(UNUSED),
        "verl.utils.device": dict.fromkeys(("get_device_name", "get_torch_device")),
        "verl.trainer.config": {"AlgoConfig": type("AlgoConfig", (), {})},
        "verl.workers.config": {"ActorConfig": DictConfig},
    }
    for name, values in stubs.items():
        vars(made.setdefault(name, ModuleType(name))).update(values)
    sys.modules.update(made)
    try:
        return import_module("verl.trainer.ppo.core_algos")
    finally:
        for name in [n for n in sys.modules if n in made or n.startswith("verl.")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def batches() -> Batches:
    return random_batches(NUM_BATCHES, seed=6)


@pytest.fixture(scope="module")
def valued() -> ValuedBatches:
    return valued_batches(NUM_BATCHES, seed=8)


def rows(batch: int, *values: Tensor) -> Iterator[Tensor]:
    """Of each of ``values`` [B, P, G, T] one batch's, [P G, T]; float64 where it is a mask."""
    for each in values:
        yield each[batch].flatten(0, 1).double()


def token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, P, G, T], each response's reward [B, P, G] at its last trained token."""
    last = (mask * torch.arange(MAX_TOKENS)).argmax(-1, keepdim=True)
    return torch.zeros(mask.shape, dtype=torch.float64).scatter(-1, last, rewards[..., None])


def with_kl(verl: Any, b: Batches, settings: Mapping[str, Any]) -> Tensor:
    """[B, P, G, T], rewards of the tokens with the KL in them that a recipe's ``settings`` say."""
    # float32, as a completion and a frozen model have them
    sampled, reference = b.old.float().double(), b.reference.float().double()
    kl = verl.kl_penalty(sampled, reference, settings.get("kl_in_reward_estimator", "k1"))
    own = token_rewards(b.rewards, b.mask)
    return own - settings.get("kl_in_reward_coef", 0.0) * kl * b.mask


def recipe_of(recipes: ModuleType, name: str, settings: Mapping[str, Any]) -> Any:
    """``name``: of the recipe, or of a case: the recipe's, a comma, and what is special."""
    built_in = import_module(f"{recipes.__name__}.loading").BUILT_IN
    return built_in[name.partition(",")[0]](**settings)


# ---- advantages ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """What verl calls the advantages of a recipe with ``settings``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_batch: bool = False  # normalised over its tokens


KL_IN_REWARD = {"kl_in_reward_coef": 0.1}
K2_IN_REWARD = {"kl_in_reward_coef": 0.1, "kl_in_reward_estimator": "k2"}
OVER_TOKENS = Estimator("reinforce_plus_plus", {"config": DictConfig({"gamma": 1.0})}, {}, True)
ESTIMATORS = {
    "grpo": Estimator("grpo", {"epsilon": 1e-4}),
    "dr_grpo": Estimator("grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": Estimator("rloo"),
    "reinforce_pp": OVER_TOKENS,
    "reinforce_pp, KL in the reward": replace(OVER_TOKENS, settings=KL_IN_REWARD),
    "reinforce_pp, k2 in the reward": replace(OVER_TOKENS, settings=K2_IN_REWARD),
    "reinforce_pp_baseline": Estimator("reinforce_plus_plus_baseline", of_batch=True),
}


def our_advantages(recipes: ModuleType, recipe: Any, batches: Batches) -> Tensor:
    """[B, P, G, T], 0 where not trained."""
    row = packed(recipes, recipe, batches)
    made = torch.zeros(batches.mask.shape, dtype=torch.float64)
    made[row.places] = row.terms.advantages
    return made


def check_advantages(recipes: ModuleType, verl: Any, name: str, batches: Batches) -> None:
    case = ESTIMATORS[name]
    recipe = recipe_of(recipes, name, case.settings)
    ours = our_advantages(recipes, recipe, batches)
    if case.of_batch:  # verl's variance of N tokens is divided by N - 1, ours by N
        num = batches.mask.sum((1, 2, 3), keepdim=True)
        ours = ours * torch.sqrt((num - 1) / num)
    rewards = with_kl(verl, batches, case.settings)
    for b in range(len(batches.groups)):
        got, given, mask = rows(b, ours, rewards, batches.mask)
        theirs, _ = verl.get_adv_estimator_fn(case.name)(
            token_level_rewards=given, response_mask=mask, index=PROMPTS, **case.options
        )
        torch.testing.assert_close(got, theirs, **(WHITENED if case.of_batch else OF_FLOATS))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_verl_s(verl: Any, batches: Batches, name: str) -> None:
    check_advantages(easyrl.recipes, verl, name, batches)


def check_gdpo(recipes: ModuleType, verl: Any, batches: Batches) -> None:
    ours = our_advantages(recipes, recipe_of(recipes, "gdpo", {}), batches)
    one = torch.ones(RESPONSES, 1, dtype=torch.float64)  # a token for each response
    given = {"prompts": one, "attention_mask": torch.cat([one, one], 1).long()}
    names = list(WEIGHTS)
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": [WEIGHTS[n] for n in names]}
    for b in range(len(batches.groups)):
        theirs, _ = verl.compute_gdpo_outcome_advantage(
            token_level_rewards=one,
            response_mask=one,
            index=PROMPTS,
            epsilon=1e-4,
            config=DictConfig(config),
            non_tensor_batch={n: batches.components[n][b].flatten().numpy() for n in names},
            batch=given,
        )
        got, mask = rows(b, ours, batches.mask)
        # ours adds 1e-4 to the second deviation, which is above 0.1, verl 1e-8 to its square;
        # verl has float32
        torch.testing.assert_close(got, theirs * mask, rtol=1e-3, atol=1e-5)


def test_gdpo_s_advantages_are_verl_s_where_responses_are_as_long(
    verl: Any, batches: Batches
) -> None:
    check_gdpo(easyrl.recipes, verl, batches)


# ---- losses --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A recipe with ``settings``, and what verl calls the same."""

    loss: str
    aggregation: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    low: float = 0.2
    high: float = 0.2
    c: float = NEVER
    kl: tuple[float, str] | None = None
    kl_in_reward: float = 0.0


CASES = {
    "grpo": Case("vanilla", "seq-mean-token-mean", kl=(0.04, "low_var_kl")),
    "dr_grpo": Case("vanilla", "seq-mean-token-sum-norm"),
    "dapo": Case("vanilla", "token-mean", {"overlong_buffer": 0.0}, high=0.28),
    "dual_clip": Case("vanilla", "token-mean", c=3.0),
    "two_sided": Case(
        "vanilla", "token-mean", {"entropy_coef": 0.0}, c=4.0, kl=(0.001, "low_var_kl")
    ),
    "reinforce_pp": Case("vanilla", "token-mean"),
    "reinforce_pp_baseline": Case("vanilla", "token-mean", kl=(1e-3, "mse")),
    "gdpo": Case("vanilla", "seq-mean-token-mean"),
    "gspo": Case("gspo", "seq-mean-token-mean", low=3e-4, high=4e-4),
    "gspo, wide": Case(
        *("gspo", "seq-mean-token-mean", {"clip_eps_low": 0.3, "clip_eps_high": 0.4}, 0.3, 0.4)
    ),
    "gspo_token": Case(
        *("gspo", "seq-mean-token-mean", {"kl_in_reward_coef": 0.1}, 3e-4, 4e-4),
        kl_in_reward=0.1,
    ),
    "cispo": Case("cispo", "token-mean", low=1.0, high=4.0),
    "cispo, lower bound": Case(
        *("cispo", "token-mean", {"clip_eps_low": 0.3, "clip_eps_high": 1.0}, 0.3, 1.0)
    ),
}


def actor_config(case: Case) -> DictConfig:
    return DictConfig(
        {
            "clip_ratio": 0.2,
            "clip_ratio_low": case.low,
            "clip_ratio_high": case.high,
            "clip_ratio_c": case.c,
            "global_batch_info": {"global_batch_size": RESPONSES, "loss_scale_factor": MAX_TOKENS},
        }
    )


def verl_loss(
    verl: Any, case: Case, batches: Batches, batch: int, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Of one batch: the loss, and how many tokens are clipped, and by the dual clip."""
    policy, old, reference, own, mask = rows(
        batch, batches.policy, batches.old, batches.reference, advantages, batches.mask
    )
    config = actor_config(case)
    loss, logged = verl.get_policy_loss_fn(case.loss)(
        old_log_prob=old,
        log_prob=policy,
        advantages=own,
        response_mask=mask,
        loss_agg_mode=case.aggregation,
        config=config,
    )
    if case.kl is not None:
        coef, kind = case.kl
        kl = verl.kl_penalty(policy, reference, kind)
        loss = loss + coef * verl.agg_loss(kl, mask, case.aggregation, **config.global_batch_info)
    shares = [logged[f"actor/{name}"] for name in ("pg_clipfrac", "pg_clipfrac_lower")]
    return loss, torch.tensor(shares, dtype=torch.float64) * mask.sum()


def assert_same(got: Tensor, expected: Tensor, leaf: Tensor, tolerance: dict[str, float]) -> None:
    """Losses [B] and the gradients of their sums."""
    torch.testing.assert_close(got, expected, **tolerance)
    gradients = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (got, expected)]
    assert gradients[1].abs().sum() > 0
    torch.testing.assert_close(*gradients, **tolerance)


def check_loss(
    recipes: ModuleType,
    verl: Any,
    name: str,
    batches: Batches,
    other: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Its metrics. ``other``: settings that verl is not told of."""
    case = CASES[name]
    recipe = recipe_of(recipes, name, {**case.settings, **other})
    row = packed(recipes, recipe, batches)
    terms = recipe.loss(row.logprobs, row.entropy, row.terms)
    num = len(batches.groups)
    losses = torch.zeros(num, dtype=torch.float64).index_add(0, row.batch, terms)
    advantages = our_advantages(recipes, recipe, batches)
    if case.kl_in_reward > 0:  # verl's loss is given them with the advantages
        advantages = advantages - case.kl_in_reward * to_go(
            batches.policy - batches.reference, batches
        )
    theirs = [verl_loss(verl, case, batches, b, advantages) for b in range(num)]
    tolerance = OF_RESPONSES if case.aggregation == "seq-mean-token-mean" else EXACT
    expected = torch.stack([loss for loss, _ in theirs])
    assert_same(losses / row.denominators, expected, batches.policy, tolerance)
    found = recipe.metrics(row.logprobs.detach(), row.entropy.detach(), row.terms)
    metrics = {key: float(value) for key, value in found.items()}
    clipped, lower = torch.stack([counts for _, counts in theirs]).sum(0).tolist()
    assert metrics["clip_low_sum"] + metrics["clip_high_sum"] == pytest.approx(clipped, rel=1e-6)
    dual = [metrics[key] for key in ("clip_dual_sum", "clip_delta_sum") if key in metrics]
    assert sum(dual) == pytest.approx(lower, rel=1e-6)
    return metrics


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_clipped_share_are_verl_s(verl: Any, batches: Batches, name: str) -> None:
    metrics = check_loss(easyrl.recipes, verl, name, batches)
    acting = {key: metrics[key] for key in metrics if key.startswith("clip_")}
    if name == "cispo":  # whose weight has no lower bound
        del acting["clip_low_sum"]
    assert acting and min(acting.values()) > 0  # the comparison is about clipping, too


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("dual_clip", {"clip_ratio_c": 3.1}),
        ("gspo, wide", {"clip_eps_high": 0.41}),
        ("cispo", {"clip_eps_high": 4.1}),
        ("reinforce_pp_baseline", {"kl_coef": 1.1e-3}),
    ],
)
def test_another_setting_is_not_verl_s(
    verl: Any, batches: Batches, name: str, other: Mapping[str, float]
) -> None:
    with pytest.raises(AssertionError):
        check_loss(easyrl.recipes, verl, name, batches, other)


# ---- RLOO ----------------------------------------------------------------------------------------


def check_rloo(recipes: ModuleType, verl: Any, batches: Batches, coef: float) -> None:
    recipe = recipe_of(recipes, "rloo", {"kl_in_reward_coef": coef})
    row = packed(recipes, recipe, batches)
    terms = recipe.loss(row.logprobs, row.entropy, row.terms)
    (ours,) = torch.autograd.grad((terms / row.denominators[row.batch]).sum(), batches.policy)
    rewards = with_kl(verl, batches, {"kl_in_reward_coef": coef})
    losses = []
    for b in range(len(batches.groups)):
        policy, old, own, mask = rows(b, batches.policy, batches.old, rewards, batches.mask)
        advantages, _ = verl.compute_rloo_outcome_advantage(own, mask, PROMPTS)
        loss, _ = verl.compute_policy_loss_reinforce(
            *(old, policy, advantages, mask, "seq-mean-token-sum"),
            config=actor_config(Case("reinforce", "seq-mean-token-sum")),
        )
        losses.append(loss)
    (theirs,) = torch.autograd.grad(torch.stack(losses).sum(), batches.policy)
    whole = batches.mask.any(-1).all(-1)  # groups in which each response has a trained token
    assert whole.sum() > 0.8 * whole.numel() and theirs[whole].abs().sum() > 0
    torch.testing.assert_close(ours[whole], theirs[whole], **OF_FLOATS)
    if coef == 0:
        torch.testing.assert_close(ours, theirs, **OF_FLOATS)


@pytest.mark.parametrize("coef", [0.0, 0.05])
def test_rloo_s_gradient_is_verl_s_reinforce(verl: Any, batches: Batches, coef: float) -> None:
    check_rloo(easyrl.recipes, verl, batches, coef)


# ---- PPO -----------------------------------------------------------------------------------------

GAMES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "another game": {"gamma": 0.9, "gae_lambda": 0.5},
    "KL in the reward": KL_IN_REWARD,
    "k2 in the reward": K2_IN_REWARD,
}


def check_ppo(recipes: ModuleType, verl: Any, name: str, data: ValuedBatches) -> None:
    """Advantages and returns, the policy's and the critic's loss, and their gradients."""
    b, settings = data.batches, GAMES[name]
    recipe = recipe_of(recipes, "ppo", settings)
    row = row_of(recipes, recipe, data)
    advantages, returns = torch.zeros_like(b.old), data.old_values.clone()
    advantages[row.at] = row.terms.advantages
    returns[row.at] = row.value_terms.returns
    rewards = with_kl(verl, b, settings)
    losses, value_losses, clipped = [], [], 0.0
    for i in range(len(b.groups)):
        given, old_values, values, mask = rows(i, rewards, data.old_values, data.values, b.mask)
        own, targets = rows(i, advantages, returns)
        gamma, lam = settings.get("gamma", 1.0), settings.get("gae_lambda", 0.95)
        theirs, their_targets = verl.compute_gae_advantage_return(
            given, old_values, mask, gamma, lam
        )
        torch.testing.assert_close(own, theirs * mask, **WHITENED_PPO)
        torch.testing.assert_close(targets * mask, their_targets * mask, **EXACT)
        loss, _ = verl_loss(verl, Case("vanilla", "token-mean"), b, i, advantages)
        value_loss, share = verl.compute_value_loss(values, targets, old_values, mask, 0.2)
        losses.append(loss)
        value_losses.append(value_loss)
        clipped += float(share * mask.sum())

    logprobs, values = b.policy[row.at], data.values[row.at]
    terms = recipe.loss(logprobs, b.entropy[row.at], row.terms)
    value_terms = recipe.value_loss(values, row.value_terms)
    for own, divisors, expected, leaf in (
        (terms, row.denominators, losses, b.policy),
        (value_terms, row.value_denominators, value_losses, data.values),
    ):
        sums = torch.zeros(len(b.groups), dtype=torch.float64).index_add(0, row.at[0], own)
        assert_same(sums / divisors, torch.stack(expected), leaf, EXACT)
    share = recipe.value_metrics(values.detach(), row.value_terms)["clip_fraction"]
    assert 0 < float(share) == pytest.approx(clipped, rel=1e-6)


@pytest.mark.parametrize("name", GAMES)
def test_advantages_returns_and_both_losses_of_ppo_are_verl_s(
    verl: Any, valued: ValuedBatches, name: str
) -> None:
    check_ppo(easyrl.recipes, verl, name, valued)


# ---- mistakes ------------------------------------------------------------------------------------

MISTAKES = [
    (
        partial(check_advantages, name="grpo"),
        Mutation("estimators.py", "exact - exact.mean()", "exact + exact.mean()"),
    ),
    (
        partial(check_advantages, name="rloo"),
        Mutation("estimators.py", "* len(rewards) / (len(rewards) - 1)", ""),
    ),
    (
        partial(check_advantages, name="reinforce_pp"),
        Mutation("estimators.py", "(values - mean) / (dev", "(values + mean) / (dev"),
    ),
    (
        partial(check_advantages, name="reinforce_pp_baseline"),
        Mutation("reinforce_pp_baseline.py", ', "group_mean")', ', "group_std")'),
    ),
    (check_gdpo, Mutation("estimators.py", "total += weight", "total -= weight")),
    (
        partial(check_loss, name="dual_clip"),
        Mutation("dual_clip.py", "torch.maximum(plain", "torch.minimum(plain"),
    ),
    (
        partial(check_loss, name="gspo"),
        Mutation("gspo.py", "logprobs - terms.old_logprobs\n", "terms.old_logprobs - logprobs\n"),
    ),
    (
        partial(check_loss, name="gspo_token"),
        Mutation("gspo_token.py", "terms).detach()", "terms)"),
    ),
    (partial(check_loss, name="cispo"), Mutation("cispo.py", "terms).detach()", "terms)")),
    (
        partial(check_loss, name="grpo"),
        Mutation("surrogate.py", "losses + self.kl_coef", "losses - self.kl_coef"),
    ),
    (partial(check_rloo, coef=0.05), Mutation("rloo.py", "(in_group - kl)", "(in_group + kl)")),
]
OF_PPO = [
    Mutation("estimators.py", "t + 1] - padded[1, :, t]", "t + 1] + padded[1, :, t]"),
    Mutation("ppo.py", "torch.maximum(losses", "torch.minimum(losses"),
]


@pytest.mark.parametrize(("check", "mutation"), MISTAKES, ids=[str(row[1]) for row in MISTAKES])
def test_a_mistake_of_ours_is_not_verl_s(
    verl: Any, check: Callable[..., Any], mutation: Mutation
) -> None:
    few = random_batches(20, seed=7)
    check(easyrl.recipes, verl, batches=few)
    assert_killed(mutation, partial(check, verl=verl, batches=few))


@pytest.mark.parametrize("mutation", OF_PPO, ids=str)
def test_a_mistake_of_our_ppo_is_not_verl_s(verl: Any, mutation: Mutation) -> None:
    few = valued_batches(20, seed=7)
    assert_killed(mutation, partial(check_ppo, verl=verl, name="ppo", data=few))
