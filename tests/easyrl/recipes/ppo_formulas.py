"""PPO written down again, token by token and on padded tensors, and recipes compared with it.

Nothing of ``easyrl.recipes`` is used in a formula. Generalised advantages are the double sum of
arXiv 1506.02438, eq. 16, in plain Python; losses are torch on [B, P, G, T], as in
``transcriptions.py``. All in fp64, of inputs that are float32 where the trainer's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.schema import GroupOutputs, RolloutGroup, SampleKey
from tests.easyrl.recipes.transcriptions import (
    MAX_TOKENS,
    NUM_GENERATIONS,
    WEIGHTS,
    Batches,
    random_batches,
)

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}


@dataclass(frozen=True)
class ValuedBatches:
    """Random ragged batches, and what a critic says of their states."""

    batches: Batches
    old_values: Tensor  # [B, P, G, T], as the batch began
    values: Tensor  # [B, P, G, T], now; carries gradient


@dataclass(frozen=True)
class Case:
    """A recipe with ``settings``; the formulas read them with PPO's published defaults."""

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        defaults = {
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "whiten": True,
            "value_clip": 0.2,
            "value_coef": 0.5,
            "kl_in_reward_coef": 0.0,
            "clip": 0.2,
            "filter": "best_random",
        }
        return {**defaults, **self.settings}[key]


CASES = {
    "ppo": Case("ppo"),
    "ppo, streaming": Case("ppo", {"whiten": False}),
    "ppo, another game": Case("ppo", {"gamma": 0.9, "gae_lambda": 0.5, "whiten": False}),
    "ppo, KL in the reward": Case("ppo", {"kl_in_reward_coef": 0.1}),
    "ppo, plain squares": Case("ppo", {"value_clip": None, "value_coef": 1.0}),
    "pf_ppo": Case("pf_ppo"),
    "pf_ppo, best and worst": Case("pf_ppo", {"filter": "best_worst", "whiten": False}),
    "pf_ppo, best of n": Case("pf_ppo", {"filter": "best_of_n", "whiten": False}),
}


def valued_batches(count: int, seed: int = 0) -> ValuedBatches:
    batches = random_batches(count, seed)
    rng = np.random.default_rng(seed + 1)
    shape = tuple(batches.old.shape)
    old = torch.from_numpy(rng.normal(0.5, 0.5, shape).astype(np.float32)).double()
    values = old + torch.from_numpy(rng.normal(0, 0.3, shape))
    return ValuedBatches(batches, old, values.requires_grad_())


# ---- the formulas --------------------------------------------------------------------------------


def raw_advantages(case: Case, data: ValuedBatches) -> Tensor:
    """[B, P, G, T]: the double sum over each response's trained tokens; zero elsewhere."""
    b = data.batches
    made = torch.zeros_like(data.old_values)
    sampled, reference = b.old.float().double(), b.reference.float().double()
    for place in np.ndindex(*b.lengths.shape):
        tokens = b.mask[place].nonzero().flatten().tolist()
        rewards = [
            -case["kl_in_reward_coef"] * float(sampled[place][t] - reference[place][t])
            for t in tokens
        ]
        if tokens:
            rewards[-1] += float(b.rewards[place])
        values = [float(data.old_values[place][t]) for t in tokens] + [0.0]
        deltas = [
            reward + case["gamma"] * values[i + 1] - values[i] for i, reward in enumerate(rewards)
        ]
        decay = case["gamma"] * case["gae_lambda"]
        for i, t in enumerate(tokens):
            made[place][t] = sum(decay**k * delta for k, delta in enumerate(deltas[i:]))
    return made


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Each batch's by its mean and sample variance over ``mask``, as TRL's ``masked_whiten``."""
    made = torch.zeros_like(advantages)
    for b in range(len(advantages)):
        own = advantages[b][mask[b]]
        made[b] = (advantages[b] - own.mean()) / torch.sqrt(own.var() + 1e-8)
    return made


def num_trained(mask: Tensor) -> Tensor:
    """[B]; 1 where one response is left of each group, and none of them has a trained token."""
    return mask.sum((1, 2, 3)).clamp(min=1)


def policy_loss(case: Case, data: ValuedBatches, advantages: Tensor, mask: Tensor) -> Tensor:
    """[B]"""
    ratio, eps = data.batches.ratio, case["clip"]
    terms = torch.min(ratio * advantages, torch.clamp(ratio, 1 - eps, 1 + eps) * advantages)
    return -(terms * mask).sum((1, 2, 3)) / num_trained(mask)


def value_loss(case: Case, data: ValuedBatches, returns: Tensor, mask: Tensor) -> Tensor:
    """[B]"""
    losses = (data.values - returns) ** 2
    if case["value_clip"] is not None:
        low, high = data.old_values - case["value_clip"], data.old_values + case["value_clip"]
        bounded = torch.min(torch.max(data.values, low), high)
        losses = torch.max(losses, (bounded - returns) ** 2)
    return case["value_coef"] * (losses * mask).sum((1, 2, 3)) / num_trained(mask)


# ---- recipes -------------------------------------------------------------------------------------


def said_of(group: RolloutGroup, data: ValuedBatches, place: tuple[int, int]) -> GroupOutputs:
    """What models say of a group: the padded tensors' numbers, as far as its responses go."""

    def rows(tensor: Tensor) -> tuple[np.ndarray, ...]:
        lengths = [len(c.token_ids) for c in group.completions]
        own = tensor[place].detach().numpy().astype(np.float32)
        return tuple(own[g, :length] for g, length in enumerate(lengths))

    return GroupOutputs(rows(data.old_values), rows(data.batches.reference))


def run_settings(recipes: ModuleType) -> Any:
    interface = import_module(f"{recipes.__name__}.recipe")
    return interface.RunSettings(MAX_TOKENS, NUM_GENERATIONS, 1.0, 0, WEIGHTS)


def check_selection(case: Case, recipe: Any, run: Any, data: ValuedBatches) -> None:
    """PF-PPO's responses by their rewards alone: the best, and as the filter says another one.

    Chance decides among equal rewards, and which one ``best_random`` adds. Raises
    ``AssertionError``.
    """
    takes_first, other_ranks = [], set()
    for b, groups in enumerate(data.batches.groups):
        for p, group in enumerate(groups):
            rewards = data.batches.rewards[b, p].tolist()
            chosen = list(recipe.select(group, run))
            best, worst = max(rewards), min(rewards)
            assert len(chosen) == len(set(chosen)) == (1 if case["filter"] == "best_of_n" else 2)
            assert rewards[chosen[0]] == best
            if case["filter"] == "best_worst":
                assert rewards[chosen[1]] == worst
            if rewards.count(best) > 1:
                takes_first.append(chosen[0] == rewards.index(best))
            if len(set(rewards)) == len(rewards):
                other_ranks |= {sorted(rewards, reverse=True).index(rewards[i]) for i in chosen[1:]}
    assert 0.1 < np.mean(takes_first) < 0.9  # of two a half, of three a third
    if case["filter"] == "best_random":
        assert other_ranks == set(range(1, NUM_GENERATIONS))


@dataclass(frozen=True)
class Row:
    """All batches' trained tokens as one row, as the recipe makes it."""

    terms: Any  # of the module's ``Terms``
    value_terms: Any
    denominators: Tensor  # [B]
    value_denominators: Tensor
    at: tuple[Tensor, ...]  # four times int64 [n], into [B, P, G, T]


def row_of(recipes: ModuleType, recipe: Any, data: ValuedBatches) -> Row:
    interface, groups_module = (
        import_module(f"{recipes.__name__}.{name}") for name in ("recipe", "groups")
    )
    run = run_settings(recipes)
    made: dict[str, list[np.ndarray]] = {"advantages": [], "returns": [], "loss_weights": []}
    places, sequences, denominators = [], [], []
    for b, groups in enumerate(data.batches.groups):
        said = [said_of(group, data, (b, p)) for p, group in enumerate(groups)]
        pairs = zip(groups, said, strict=True)
        statistics = [groups_module.group_statistics(recipe, run, *pair) for pair in pairs]
        trained = groups_module.trained_groups(recipe, run, groups, statistics, said)
        for p, group in enumerate(trained):
            for response in group.responses:
                own = np.array([b, p, response.sample])[:, None].repeat(len(response.tokens), 1)
                places.append(np.concatenate([own, response.tokens[None]]))
                sequences.append(SampleKey(b, p, response.sample))
                for name, values in made.items():
                    values.append(getattr(response, name))
        counts = recipe.denominator(groups, run), recipe.value_denominator(groups, run)
        denominators.append(counts)
    at = tuple(torch.from_numpy(each) for each in np.concatenate(places, axis=1))
    whole = {name: torch.from_numpy(np.concatenate(values)) for name, values in made.items()}
    lengths = torch.tensor([len(own[0]) for own in places])
    returns, old = whole.pop("returns"), data.batches.old[at]
    terms = interface.Terms(
        **whole,
        inference_logprobs=old,
        old_logprobs=old,
        reference_logprobs=data.batches.reference[at] if recipe.needs.reference else None,
        sequence_index=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        sequences=tuple(sequences),
    )
    value_terms = interface.ValueTerms(returns, data.old_values[at])
    return Row(terms, value_terms, *torch.tensor(denominators).T, at)


def check_case(recipes: ModuleType, case: Case, data: ValuedBatches) -> dict[str, float]:
    """Advantages, returns, both losses and their gradients against the formulas; the metrics.

    ``recipes``: the package ``easyrl.recipes``, or a copy of it. Raises ``AssertionError``.
    """
    loading = import_module(f"{recipes.__name__}.loading")
    recipe = loading.BUILT_IN[case.recipe](**case.settings)
    if case.recipe == "pf_ppo":
        check_selection(case, recipe, run_settings(recipes), data)
    row = row_of(recipes, recipe, data)
    mask = torch.zeros_like(data.batches.mask)
    mask[row.at] = True
    raw = raw_advantages(case, data)
    advantages, returns = whitened(raw, mask) if case["whiten"] else raw, raw + data.old_values
    torch.testing.assert_close(row.terms.advantages, advantages[row.at], **TOLERANCE)
    torch.testing.assert_close(row.value_terms.returns, returns[row.at], **TOLERANCE)

    logprobs, values = data.batches.policy[row.at], data.values[row.at]
    entropy = data.batches.entropy[row.at]
    losses = recipe.loss(logprobs, entropy, row.terms)
    value_losses = recipe.value_loss(values, row.value_terms)
    of_policy = policy_loss(case, data, advantages, mask), data.batches.policy
    of_critic = value_loss(case, data, returns, mask), data.values
    for terms, divisors, (formula, leaf) in (
        (losses, row.denominators, of_policy),
        (value_losses, row.value_denominators, of_critic),
    ):
        sums = torch.zeros_like(formula).index_add(0, row.at[0], terms) / divisors.clamp(min=1)
        torch.testing.assert_close(sums, formula, **TOLERANCE)
        gradients = [
            torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (sums, formula)
        ]
        assert gradients[1].abs().sum() > 0
        torch.testing.assert_close(*gradients, **TOLERANCE)
    counted = recipe.metrics(logprobs.detach(), entropy.detach(), row.terms)
    counted |= recipe.value_metrics(values.detach(), row.value_terms)
    return {name: float(value) for name, value in counted.items()} | {"num": float(len(values))}
