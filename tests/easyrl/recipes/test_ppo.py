"""PPO's and PF-PPO's advantages, returns, both losses and gradients are the published equations'.

No trainer to compare with can be imported: TRL 1.16 has no PPO any more. Its whitening, clips and
generalised advantages are what ``ppo_formulas.py`` writes down.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import numpy as np
import pytest
import torch

import easyrl.recipes
from easyrl.recipes import PFPPO, PPO, AdvantageInputs, RunSettings, ValueTerms
from easyrl.recipes.estimators import generalised_advantages, merged_moments, moments
from easyrl.recipes.recipe import Models
from easyrl.schema import Prompt, RolloutGroup, Score
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package
from tests.easyrl.recipes.ppo_formulas import CASES, ValuedBatches, check_case, valued_batches
from tests.tiny_models import random_group

RUN = RunSettings(max_tokens=16, num_generations=5, temperature=1.0, seed=3)

# By the case whose formulas have to notice.
MUTATIONS = {
    "ppo": [
        Mutation("ppo.py", "(own - mean) / deviation", "own / deviation"),
        Mutation("ppo.py", "(own - mean) / deviation", "(own - mean)"),
        Mutation("ppo.py", "max(num - 1, 1)", "max(num, 1)"),
        Mutation("ppo.py", "whiten: bool = True", "whiten: bool = False"),
        Mutation("ppo.py", "] = 0.95", "] = 1.0"),
        Mutation("ppo.py", "] = 1.0", "] = 0.99"),
        Mutation("ppo.py", "None = 0.2", "None = 0.3"),
        Mutation("ppo.py", "PositiveFloat = 0.5", "PositiveFloat = 1.0"),
        Mutation("ppo.py", "torch.maximum(losses", "torch.minimum(losses"),
        Mutation("ppo.py", "terms.old_values + moved", "terms.old_values - moved"),
        Mutation("ppo.py", ".clamp(-self.value_clip, self", ".clamp(-2 * self.value_clip, self"),
        Mutation("ppo.py", ".clamp(-self.value_clip, self", ".clamp(self.value_clip, self"),
        Mutation("ppo.py", "value_clip, self.value_clip)", "value_clip, 2 * self.value_clip)"),
        Mutation("ppo.py", "value_clip, self.value_clip)", "value_clip, -self.value_clip)"),
        Mutation("ppo.py", "own[-1] += ", "own[-1] -= "),
        Mutation("ppo.py", "own[-1] += ", "own[0] += "),
        Mutation("ppo.py", "[a + v for a, v", "[a for a, v"),
        Mutation("ppo.py", "[a + v for a, v", "[a - v for a, v"),
        Mutation("ppo.py", "return self.value_coef * losses", "return -self.value_coef * losses"),
        Mutation("recipe.py", "Recipe.denominator(self, groups, run)", "float(len(groups))"),
        Mutation("estimators.py", "gamma * padded[1, :, t + 1] -", "gamma * padded[1, :, t] -"),
        Mutation("estimators.py", "t + 1] - padded[1, :, t]", "t + 1] + padded[1, :, t]"),
        Mutation("estimators.py", "gamma * gae_lambda * adv", "gae_lambda * gae_lambda * adv"),
        Mutation("estimators.py", "np.square(values - mean).sum()", "np.square(values).sum()"),
        Mutation("estimators.py", "merged[2] + part[2] + difference", "merged[2] + difference"),
        Mutation(
            "estimators.py",
            "difference**2 * merged[0] * part[0] / num",
            "difference**2 * merged[0] / num",
        ),
        Mutation("estimators.py", "difference * part[0] / num", "difference / num"),
    ],
    "ppo, another game": [
        Mutation("estimators.py", "padded[0, :, t] + gamma * padded", "padded[0, :, t] + padded"),
        Mutation("estimators.py", "delta + gamma * gae_lambda", "delta + gae_lambda"),
    ],
    "ppo, KL in the reward": [
        Mutation("ppo.py", "own -= self.kl_in_reward_coef", "own += self.kl_in_reward_coef"),
        Mutation(
            "ppo.py", "completion.logprobs[tokens] - ref", "completion.logprobs[tokens] + ref"
        ),
        Mutation("ppo.py", "return terms.advantages", "return super()._credited(logprobs, terms)"),
    ],
    "ppo, plain squares": [
        Mutation(
            "ppo.py", "(values - terms.returns).square()\n        if", "abs(values)\n        if"
        )
    ],
    "pf_ppo": [
        Mutation("ppo.py", "sorted(self.select(group, run))", "range(len(raw))"),
        Mutation("pf_ppo.py", '] = "best_random"', '] = "best_worst"'),
        Mutation("pf_ppo.py", '] = "best_random"', '] = "best_of_n"'),
        Mutation("pf_ppo.py", "rng.permutation(", "np.arange("),
        Mutation("pf_ppo.py", "argsort(-self", "argsort(self"),
        Mutation("pf_ppo.py", "(group, run)[order]", "(group, run)"),
        Mutation("pf_ppo.py", '.filter == "best_random"', '.filter != "best_random"'),
        Mutation("pf_ppo.py", "rng.integers(1, len", "rng.integers(0, len"),
        Mutation("pf_ppo.py", "rng.integers(1, len", "rng.integers(2, len"),
        Mutation("pf_ppo.py", "rng.integers(1, len(best_first))", "1"),
        Mutation("pf_ppo.py", "integers(1, len(best_first))", "integers(1, len(best_first) - 1)"),
        Mutation("pf_ppo.py", "[best_first[0], ", "[best_first[-1], "),
    ],
    "pf_ppo, best and worst": [
        Mutation("pf_ppo.py", "other = len(best_first) - 1", "other = len(best_first) - 2"),
        Mutation("pf_ppo.py", "[best_first[0], ", "[best_first[1], "),
        Mutation("pf_ppo.py", "rng.permutation(", "np.arange("),
    ],
    "pf_ppo, best of n": [
        Mutation("pf_ppo.py", '.filter == "best_of_n"', '.filter != "best_of_n"'),
        Mutation("pf_ppo.py", "best_first[:1]", "best_first[-1:]"),
        Mutation("pf_ppo.py", "best_first[:1]", "best_first[:2]"),
    ],
}


@pytest.fixture(scope="module")
def data() -> ValuedBatches:
    return valued_batches(1000)


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_its_published_equations(data: ValuedBatches, name: str) -> None:
    metrics = check_case(easyrl.recipes, CASES[name], data)
    assert metrics["clip_low_sum"] > 0 and metrics["clip_high_sum"] > 0
    if CASES[name]["value_clip"] is not None:  # the comparison is about the values' clip too
        assert 0 < metrics["clip_fraction"] < metrics["num"]


@cache
def few() -> ValuedBatches:
    return valued_batches(30, seed=5)


def check(recipes: ModuleType, name: str) -> None:
    check_case(recipes, CASES[name], few())


def test_a_copy_without_a_mutation_passes() -> None:
    with copied_package() as copy:
        for name in CASES:
            check(copy, name)


@pytest.mark.parametrize(
    ("name", "mutation"), [(name, m) for name, rows in MUTATIONS.items() for m in rows], ids=str
)
def test_a_mutation_is_found(name: str, mutation: Mutation) -> None:
    assert_killed(mutation, partial(check, name=name))


# ---- advantages ----------------------------------------------------------------------------------


def test_the_ends_of_lambda() -> None:
    """1: the rewards to go less the value. 0: the one-step error."""
    rng = np.random.default_rng(0)
    rewards, values = ([rng.normal(size=n) for n in (1, 4, 7)] for _ in range(2))
    for r, v, long, short in zip(
        rewards,
        values,
        generalised_advantages(rewards, values, 1.0, 1.0),
        generalised_advantages(rewards, values, 0.9, 0.0),
        strict=True,
    ):
        np.testing.assert_allclose(long, r[::-1].cumsum()[::-1] - v, rtol=1e-12)
        np.testing.assert_allclose(short, r + 0.9 * np.append(v[1:], 0) - v, rtol=1e-12)
    assert [len(a) for a in generalised_advantages([np.zeros(0)], [np.zeros(0)], 1, 1)] == [0]


def test_moments_of_parts_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.normal(1e6, 1, n) for n in (3, 0, 1, 40)]  # a mean that would swallow the variance
    num, mean, squares = merged_moments([moments(part) for part in parts])
    whole = np.concatenate(parts)
    assert num == len(whole) and mean == pytest.approx(whole.mean(), rel=1e-15)
    assert squares / (num - 1) == pytest.approx(whole.var(ddof=1), rel=1e-9)


def test_advantages_do_not_depend_on_the_batch_unless_they_are_whitened() -> None:
    groups = [group([3, 5], [0.0, 1.0], index) for index in range(2)]
    values = tuple(tuple(np.zeros(len(c.token_ids)) for c in g.completions) for g in groups)
    inputs = AdvantageInputs((), values, ())
    plain = PPO(whiten=False)
    together = plain.advantages(groups, RUN, inputs)
    alone = plain.advantages(groups[1:], RUN, AdvantageInputs((), values[1:], ()))
    assert all(np.array_equal(a, b) for a, b in zip(together[1], alone[0], strict=True))
    assert together[1][0].tolist() == [0.0] * 3
    np.testing.assert_allclose(together[1][1], 0.95 ** np.arange(4, -1, -1))


def test_what_ppo_asks_for() -> None:
    assert PPO().before_advantages == Models(critic=True)
    with_kl = PPO(kl_in_reward_coef=0.1)
    assert with_kl.before_advantages == Models(critic=True, reference=True)
    assert with_kl.span == "token" and with_kl.needs.reference and with_kl.needs.critic
    assert PPO(kl_coef=0.1).before_advantages == Models(critic=True)  # behind the advantages
    assert (PPO().scope, PPO(whiten=False).scope) == ("batch", "group")
    assert not PPO().advantage_only  # groups of equal rewards teach the critic


def test_the_value_clip_has_no_gradient_beyond_it_and_the_plain_square_has() -> None:
    values = torch.tensor([0.0, 0.5, 0.5, -0.5], dtype=torch.float64).requires_grad_()
    terms = ValueTerms(torch.tensor([1.0, 1.0, -1.0, -1.0]).double(), torch.zeros(4).double())
    (gradient,) = torch.autograd.grad(PPO().value_loss(values, terms).sum(), values)
    # within; towards its return beyond the clip; away from it beyond the clip; towards it
    assert gradient.tolist() == [-1.0, 0.0, 1.5, 0.0]
    (gradient,) = torch.autograd.grad(PPO(value_clip=None).value_loss(values, terms).sum(), values)
    assert gradient.tolist() == [-1.0, -0.5, 1.5, 0.5]
    assert float(PPO().value_metrics(values.detach(), terms)["clip_fraction"]) == 2


# ---- PF-PPO --------------------------------------------------------------------------------------


def group(lengths: list[int], rewards: list[float], index: int = 0) -> RolloutGroup:
    made = random_group(np.random.default_rng(index), 2, lengths, index=index)
    return replace(made, scores=tuple(Score(reward, {}) for reward in rewards))


def ranks(filter_: str, rewards: list[float], count: int = 4000) -> Counter[tuple[int, ...]]:
    """How often which places are trained, of as many prompts."""
    recipe = PFPPO(filter=filter_)  # type: ignore[arg-type]
    made = group([2] * len(rewards), rewards)
    prompts = (Prompt(i, made.prompt.token_ids, "", None) for i in range(count))
    return Counter(tuple(recipe.select(replace(made, prompt=p), RUN)) for p in prompts)


def test_the_expected_shares_are_the_paper_s_weights() -> None:
    """N = 5: w = (1/2, 1/8, 1/8, 1/8, 1/8), (1/2, 0, 0, 0, 1/2) and (1, 0, 0, 0, 0)."""
    rewards = [0.3, 0.9, 0.1, 0.5, 0.7]  # the best at place 1, the worst at 2
    assert set(ranks("best_worst", rewards)) == {(1, 2)}
    assert set(ranks("best_of_n", rewards)) == {(1,)}
    drawn = ranks("best_random", rewards)
    assert set(drawn) == {(1, 0), (1, 2), (1, 3), (1, 4)}
    shares = [count / 4000 for count in drawn.values()]
    assert all(abs(share - 0.25) < 0.03 for share in shares)  # four deviations are 0.027


def test_equal_rewards_are_ranked_by_chance() -> None:
    best = Counter(first for first, _ in ranks("best_worst", [1.0, 0.0, 1.0, 0.0]).elements())
    assert set(best) == {0, 2} and abs(best[0] / 4000 - 0.5) < 0.04
    flat = ranks("best_worst", [1.0, 1.0, 1.0])
    assert set(flat) == {(i, j) for i in range(3) for j in range(3) if i != j}


def test_the_selection_is_a_function_of_seed_and_prompt() -> None:
    recipe, made = PFPPO(), group([2] * 5, [1.0] * 5, index=7)
    assert recipe.select(made, RUN) == recipe.select(made, RUN)
    seeds = {tuple(recipe.select(made, replace(RUN, seed=seed))) for seed in range(40)}
    assert len(seeds) > 5
    assert PFPPO().select(group([4], [1.0]), RUN) == [0]


def test_only_what_is_selected_is_counted() -> None:
    made = group([2, 3, 4, 5, 6], [0.3, 0.9, 0.1, 0.5, 0.7])
    recipe = PFPPO(filter="best_worst")
    assert recipe.denominator([made], RUN) == recipe.value_denominator([made], RUN) == 3 + 4
