"""Each sign, bound and denominator of a recipe matters: changed, it fails its transcription."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import numpy as np
import pytest
import torch

from easyrl.schema import RolloutGroup, Score
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package
from tests.easyrl.recipes.transcriptions import (
    CASES,
    Batches,
    check_recipe,
    packed,
    ppo,
    random_batches,
)
from tests.tiny_models import random_group

# By the case whose formula has to notice; what recipes share is under the one that shows it best.
MUTATIONS = {
    "grpo": [
        Mutation("surrogate.py", "losses = -self.surrogate(", "losses = self.surrogate("),
        Mutation(
            "surrogate.py",
            "torch.exp(logprobs - terms.old_logprobs)",
            "torch.exp(terms.old_logprobs - logprobs)",
        ),
        Mutation("surrogate.py", "losses + self.kl_coef * kl", "losses - self.kl_coef * kl"),
        Mutation("surrogate.py", "return terms.loss_weights * losses", "return losses"),
        Mutation(
            "aggregated.py",
            "float(sum(len(self.select(group, run)) for group in groups))",
            "float(len(groups))",
        ),
        Mutation("grpo.py", "kl_coef: NonNegativeFloat = 0.04", "kl_coef: NonNegativeFloat = 0.0"),
        Mutation("grpo.py", 'aggregation: Aggregation = "sequence"', "aggregation = 'token'"),
        Mutation("grpo.py", 'Advantage = "group_std"', 'Advantage = "group_mean"'),
        Mutation("estimators.py", "torch.minimum(ratio", "torch.maximum(ratio"),
        Mutation("estimators.py", "1.0 / max(1, int(trained.sum()))", "1.0 / len(trained)"),
        Mutation("estimators.py", "exact - exact.mean()", "exact + exact.mean()"),
        Mutation("estimators.py", "exact.std(ddof=1) + eps", "exact.std(ddof=0) + eps"),
        Mutation("estimators.py", "centred / (exact", "centred * (exact"),
        Mutation(
            "estimators.py",
            "torch.exp(-difference) - 1 + difference",
            "torch.exp(difference) - 1 - difference",
        ),
    ],
    "grpo, truncated masked": [
        Mutation("surrogate.py", "if self.mask_truncated and", "if not self.mask_truncated and")
    ],
    "grpo, k2 in the reward": [
        Mutation("surrogate.py", "terms.advantages - self.kl_in", "terms.advantages + self.kl_in"),
        Mutation("surrogate.py", "reference, self.kl_in_reward_estimator)", 'reference, "k1")'),
        Mutation("surrogate.py", "(logprobs.detach(), reference,", "(logprobs, reference,"),
        Mutation("surrogate.py", "or self.kl_in_advantages:", "or not self.kl_in_advantages:"),
        Mutation("estimators.py", "0.5 * difference.square()", "difference.square()"),
    ],
    "grpo, each reward": [
        Mutation("grpo.py", "self.weighted_rewards(g, run)", "[(1.0, g.rewards)]"),
        Mutation("grpo.py", '== "each_reward_std"', '== "group_mean"'),
        Mutation("surrogate.py", "(run.reward_weights[name], values)", "(1.0, values)"),
        Mutation("estimators.py", "total += weight *", "total -= weight *"),
        Mutation("estimators.py", "total += weight *", "total = weight *"),
        Mutation("estimators.py", "total += weight *", "total +="),
        Mutation(
            "estimators.py", 'astype(np.float64), "group_std")', 'astype(float), "group_mean")'
        ),
    ],
    "dr_grpo": [
        Mutation("dr_grpo.py", '= "group_mean"', '= "group_std"'),
        Mutation("dr_grpo.py", '= "constant"', '= "sequence"'),
        Mutation("dr_grpo.py", "NonNegativeFloat = 0.0", "NonNegativeFloat = 0.04"),
        Mutation("estimators.py", "1.0 / max_tokens", "1.0 / len(trained)"),
    ],
    "dapo": [
        Mutation("dapo.py", "PositiveFloat = 0.28", "PositiveFloat = 0.2"),
        Mutation("dapo.py", '= "token"', '= "sequence"'),
        Mutation("dapo.py", "kl_coef: NonNegativeFloat = 0.0", "kl_coef: NonNegativeFloat = 0.04"),
        Mutation("dapo.py", "run.max_tokens, self.overlong_buffer)", "run.max_tokens, 1.0)"),
        Mutation("dapo.py", "group.rewards + (self", "group.rewards - (self"),
        Mutation(
            "estimators.py", "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)"
        ),
        Mutation(
            "estimators.py", "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 + low, 1 + high)"
        ),
        Mutation("estimators.py", "weight = 1.0\n", "weight = 1.0 / len(trained)\n"),
        Mutation("aggregated.py", 'self.aggregation == "token"', 'self.aggregation != "token"'),
        Mutation(
            "recipe.py",
            "self.trained_tokens(completion, run).sum() for completion",
            "len(completion.token_ids) for completion",
        ),
    ],
    "dapo, each reward": [
        Mutation("dapo.py", "append((self.overlong_penalty,", "append((1.0,"),
        Mutation("dapo.py", "append((self.overlong_penalty,", "append((-self.overlong_penalty,"),
        Mutation("dapo.py", "self.overlong_buffer > 0:", "self.overlong_buffer < 0:"),
    ],
    "gspo": [
        Mutation("gspo.py", "PositiveFloat = 3e-4", "PositiveFloat = 4e-4"),
        Mutation("gspo.py", "PositiveFloat = 4e-4", "PositiveFloat = 3e-4"),
        Mutation("gspo.py", "NonNegativeFloat = 0.0", "NonNegativeFloat = 0.04"),
        Mutation("gspo.py", "logprobs - terms.old_logprobs\n", "terms.old_logprobs - logprobs\n"),
        Mutation(
            "estimators.py",
            "torch.exp(sums / lengths.clamp(min=1))",
            "torch.exp(sums / (lengths + 1))",
        ),
        Mutation("estimators.py", "torch.exp(sums / lengths.clamp(min=1))", "torch.exp(sums)"),
    ],
    "gspo_token": [
        Mutation("gspo_token.py", "terms).detach()", "terms)"),
        Mutation(
            "gspo_token.py",
            "torch.exp(logprobs - logprobs.detach())",
            "torch.exp(logprobs.detach() - logprobs)",
        ),
        Mutation("gspo_token.py", "return sequence * torch", "return torch"),
        Mutation(
            "surrogate.py",
            "terms.advantages - self.kl_in_reward_coef",
            "terms.advantages + self.kl_in_reward_coef",
        ),
        Mutation("surrogate.py", 'KLEstimator = "k1"', 'KLEstimator = "k3"'),
        Mutation("estimators.py", "return difference\n", "return -difference\n"),
        Mutation("estimators.py", "(exact + after - after[last])", "(after - after[last])"),
    ],
    "cispo": [
        Mutation("cispo.py", "self.ratio(logprobs, terms).detach()", "self.ratio(logprobs, terms)"),
        Mutation("cispo.py", "return weight * advantages", "return -weight * advantages"),
        Mutation("cispo.py", "return weight * advantages", "return advantages"),
        Mutation("cispo.py", "PositiveFloat = 4.0", "PositiveFloat = 5.0"),
        Mutation("cispo.py", "PositiveFloat = 1.0", "PositiveFloat = 0.9"),
        Mutation("cispo.py", '= "token"', '= "sequence"'),
        Mutation("cispo.py", "NonNegativeFloat = 0.0", "NonNegativeFloat = 0.04"),
    ],
    "cispo, lower bound": [
        Mutation("cispo.py", "ratio.clamp(1 - self.clip", "ratio.clamp(1 + self.clip"),
        Mutation("cispo.py", "eps_low, 1 + self.clip_eps_high)", "eps_low, self.clip_eps_high)"),
    ],
    "rloo": [
        Mutation("estimators.py", "centred * len(rewards) / (len(rewards) - 1)", "centred"),
        Mutation("rloo.py", "return -terms.loss_weights", "return terms.loss_weights"),
        Mutation(
            "rloo.py", "advantages - self.kl_in_reward_coef", "advantages + self.kl_in_reward_coef"
        ),
        Mutation("rloo.py", "NonNegativeFloat = 0.05", "NonNegativeFloat = 0.04"),
        Mutation("rloo.py", "(in_group - kl)", "(in_group + kl)"),
        Mutation("rloo.py", "(size - 1).clamp", "size.clamp"),
        Mutation("rloo.py", "(kl - others)", "(kl + others)"),
        Mutation("rloo.py", "(kl - others)", "kl"),
        Mutation(
            "rloo.py",
            "terms.old_logprobs, terms.reference_logprobs",
            "terms.reference_logprobs, terms.old_logprobs",
        ),
        Mutation("rloo.py", 'KLEstimator = "k1"', 'KLEstimator = "k2"'),
        Mutation("rloo.py", "float(sum(len(self.select(group, run))", "float(sum(1"),
    ],
    "rloo, k3 in the reward": [
        Mutation(
            "rloo.py", "reference_logprobs, self.kl_in_reward_estimator", "reference_logprobs, 'k1'"
        ),
        Mutation("rloo.py", "(kl - others)", "(kl + others)"),
        Mutation(
            "estimators.py",
            "torch.exp(-difference) - 1 + difference",
            "torch.exp(difference) - 1 - difference",
        ),
    ],
    "reinforce_pp": [
        Mutation("estimators.py", "(values - mean) / (dev", "(values + mean) / (dev"),
        Mutation("estimators.py", "(values - mean) / (dev", "(values - mean) * (dev"),
        Mutation("estimators.py", "(weights * batch).sum() / total", "batch.mean()"),
        Mutation("estimators.py", "np.square(batch - mean)).sum() / total", "1).sum() / total"),
        Mutation("reinforce_pp.py", "self.trained_tokens(completion, run).sum() if", "1 if"),
        Mutation("aggregated.py", '= "token"  #', '= "sequence"  #'),
        Mutation("surrogate.py", "clip_eps_low: PositiveFloat = 0.2", "clip_eps_low: float = 0.3"),
        Mutation(
            "surrogate.py", "clip_eps_high: PositiveFloat = 0.2", "clip_eps_high: float = 0.3"
        ),
    ],
    "reinforce_pp_baseline": [
        Mutation("reinforce_pp_baseline.py", ', "group_mean")', ', "group_std")'),
        Mutation("reinforce_pp_baseline.py", "NonNegativeFloat = 1e-3", "NonNegativeFloat = 1e-2"),
        Mutation("reinforce_pp_baseline.py", '] = "k2"', '] = "k3"'),
        Mutation("estimators.py", "0.5 * difference.square()", "difference.square()"),
    ],
    "reinforce_pp, KL in the reward": [
        Mutation("reinforce_pp.py", "reward - self.kl_in", "reward + self.kl_in"),
        Mutation("reinforce_pp.py", "kl[::-1].cumsum()[::-1]", "kl.cumsum()"),
        Mutation("reinforce_pp.py", "kl[::-1].cumsum()[::-1]", "kl"),
        Mutation(
            "reinforce_pp.py",
            "completion.logprobs[tokens] - reference",
            "reference - completion.logprobs[tokens]",
        ),
        Mutation("reinforce_pp.py", "(own - mean) / dev", "(own + mean) / dev"),
        Mutation("reinforce_pp.py", "(own - mean) / dev", "(own - mean) * dev"),
        Mutation("reinforce_pp.py", "squares / max(num, 1)", "squares / max(num - 1, 1)"),
        Mutation("reinforce_pp.py", "sorted(self.select(group, run))", "[0]"),
        Mutation(
            "reinforce_pp.py", "raw[i][self.trained_tokens(group.completions[i], run)]", "raw[i]"
        ),
        Mutation("reinforce_pp.py", "ClassVar[bool] = True", "ClassVar[bool] = False"),
    ],
    "reinforce_pp_baseline, k3 in the reward": [
        Mutation("reinforce_pp.py", "log_ratio, self.kl_in_reward_estimator", "log_ratio, 'k1'"),
        Mutation("reinforce_pp.py", "self.baselined(group, run), strict", "group.rewards, strict"),
        Mutation("reinforce_pp_baseline.py", ', "group_mean")', ', "group_std")'),
    ],
    "two_sided": [
        Mutation("two_sided.py", "ratio.clamp(max=self.delta)", "ratio"),
        Mutation("two_sided.py", "ratio.clamp(max=self.delta)", "ratio.clamp(min=self.delta)"),
        Mutation("two_sided.py", "PositiveFloat = 4.0", "PositiveFloat = 3.0"),
        Mutation("two_sided.py", "torch.minimum(", "torch.maximum("),
        Mutation("two_sided.py", "ratio.clamp(1 - self", "ratio.clamp(1 + self"),
        Mutation("two_sided.py", "1 + self.clip_eps_high)\n        return", "2)\n        return"),
        Mutation("two_sided.py", '= "token"', '= "sequence"'),
        Mutation("two_sided.py", "NonNegativeFloat = 0.001", "NonNegativeFloat = 0.0"),
        Mutation("two_sided.py", "float = 1e-4", "float = -1e-4"),
        Mutation("surrogate.py", "losses - self.entropy_coef", "losses + self.entropy_coef"),
    ],
    "two_sided, each reward": [
        Mutation("grpo.py", "self.weighted_rewards(g, run)", "[(1.0, g.rewards)]"),
        Mutation("two_sided.py", "torch.minimum(", "torch.maximum("),
    ],
    "dual_clip": [
        Mutation("dual_clip.py", "torch.maximum(plain", "torch.minimum(plain"),
        Mutation("dual_clip.py", "plain, self.clip_ratio_c", "plain, -self.clip_ratio_c"),
        Mutation("dual_clip.py", "where(advantages < 0", "where(advantages > 0"),
        Mutation("dual_clip.py", "] = 3.0", "] = 4.0"),
        Mutation("dual_clip.py", '= "token"', '= "sequence"'),
        Mutation("dual_clip.py", "NonNegativeFloat = 0.0", "NonNegativeFloat = 0.04"),
    ],
    # its batch mean is 0, as each group's is: a changed sign of it is the same recipe
    "gdpo": [
        Mutation("surrogate.py", "(run.reward_weights[name], values)", "(1.0, values)"),
        Mutation("estimators.py", "total += weight *", "total -= weight *"),
        Mutation(
            "estimators.py", 'astype(np.float64), "group_std")', 'astype(float), "group_mean")'
        ),
        Mutation("gdpo.py", "batch.std(ddof=1)", "batch.std(ddof=0)"),
        Mutation("gdpo.py", "- mean) / (dev", "- mean) * (dev"),
        Mutation("gdpo.py", '= "sequence"', '= "token"'),
        Mutation("gdpo.py", "NonNegativeFloat = 0.0", "NonNegativeFloat = 0.04"),
    ],
    # what it does to turns: test_turn_grpo.py
    "turn_grpo": [
        Mutation("turn_grpo.py", "            return outcomes\n", "            return -outcomes\n")
    ],
    "online_dpo": [
        Mutation("preference.py", "signed = terms", "signed = -terms"),
        Mutation("preference.py", "signed = terms.advantages.sign()", "signed = terms.advantages"),
        Mutation("preference.py", "(logprobs - terms.reference_logprobs)", "logprobs"),
        Mutation("preference.py", "PositiveFloat = 0.1", "PositiveFloat = 0.2"),
        Mutation("preference.py", "losses.where(reward_margins > 0, 0.0)", "losses"),
        Mutation("preference.py", "return float(len(groups))", "return 1.0"),
        Mutation("preference.py", "int(order[0]), int(order[-1])", "int(order[0]), int(order[-2])"),
        Mutation("preference.py", "np.argsort(group.rewards,", "np.argsort(-group.rewards,"),
        Mutation("preference.py", "own[worst] = -own[best]", "own[worst] = own[best]"),
        Mutation("preference.py", "group.rewards[best] - group", "group.rewards[best] + group"),
        Mutation("dpo.py", "= 0.0  # epsilon", "= 0.1  # epsilon"),
    ],
    "online_dpo, smoothed": [
        Mutation("dpo.py", "-(1 - self.label_smoothing) *", "-(1 + self.label_smoothing) *"),
        Mutation("dpo.py", "losses - self.label_smoothing *", "losses + self.label_smoothing *"),
    ],
    "rpo": [
        Mutation("rpo.py", "PositiveFloat = 1e-5", "PositiveFloat = 1e-4"),
        Mutation("rpo.py", "PositiveFloat = 3.0", "PositiveFloat = 1.0"),
        Mutation("rpo.py", "logsigmoid(wanted), logsigmoid(-wanted)", "(logsigmoid(wanted),) * 2"),
        Mutation("rpo.py", "(log_p - logsigmoid(margins))", "(log_p + logsigmoid(margins))"),
        Mutation("rpo.py", "(log_p - logsigmoid(margins))", "(log_p - logsigmoid(-margins))"),
        Mutation("rpo.py", "(log_q - logsigmoid(-margins))", "(log_q + logsigmoid(-margins))"),
        Mutation("rpo.py", "return chosen + log_q", "return chosen - log_q"),
        Mutation("preference.py", "terms.advantages.abs()", "terms.advantages.sign().abs()"),
    ],
    "rpo, larger beta": [
        Mutation("rpo.py", "wanted = self.reward_scale *", "wanted ="),
        Mutation("rpo.py", "chosen = log_p.exp() *", "chosen = "),
        Mutation("rpo.py", "log_q.exp() * (log_q", "(log_q"),
    ],
    "distillation": [
        Mutation(
            "distillation.py",
            "torch.exp(logprobs - terms.old_logprobs)",
            "torch.exp(terms.old_logprobs - logprobs)",
        ),
        Mutation(
            "distillation.py",
            "logprobs.detach() - terms.teacher_logprobs",
            "terms.teacher_logprobs - logprobs.detach()",
        ),
        Mutation("distillation.py", "logprobs.detach() - terms", "logprobs - terms"),
        Mutation("distillation.py", "return terms.loss_weights * ratio", "return -ratio"),
        Mutation("aggregated.py", 'Aggregation = "token"', 'Aggregation = "sequence"'),
        Mutation("aggregated.py", 'self.aggregation == "token"', 'self.aggregation == "none"'),
    ],
    "distillation, mean of responses": [
        Mutation("distillation.py", "return terms.loss_weights * ratio", "return ratio"),
        Mutation("aggregated.py", "len(self.select(group, run)) for group", "1 for group"),
    ],
    "distillation, later tokens": [
        Mutation("distillation.py", "costs = reward_to_go(costs, terms.sequence_index)", "pass"),
        Mutation("estimators.py", "(exact + after - after[last])", "(after - after[last])"),
    ],
    "distillation, full": [
        Mutation("distillation.py", "return terms.loss_weights * losses", "return losses"),
        Mutation("distillation.py", "return terms.loss_weights * losses", "return -losses"),
    ],
    "distillation, full, later tokens": [
        Mutation("distillation.py", "losses + ratio *", "losses - ratio *"),
        Mutation("distillation.py", "sequence_index) - costs)", "sequence_index))"),
        Mutation("distillation.py", "terms.teacher_kl.detach()", "terms.teacher_kl"),
    ],
}


DAPO_GROUP_MUTATIONS = [
    Mutation("dapo.py", "] = 0.2  #", "] = 0.25  #"),
    Mutation("dapo.py", "] = 0.2  #", "] = 0.0  #"),
    Mutation(
        "dapo.py", "overlong_penalty: NonNegativeFloat = 1.0", "overlong_penalty: float = 0.5"
    ),
    Mutation("dapo.py", "== 0:\n            return group", "!= 0:\n            return group"),
    Mutation("dapo.py", "dynamic_sampling: bool = True", "dynamic_sampling: bool = False"),
    Mutation("two_sided.py", "dynamic_sampling: bool = True", "dynamic_sampling: bool = False"),
    Mutation("dynamic_sampling.py", "bool = False", "bool = True"),
    Mutation("dynamic_sampling.py", "if self.dynamic_sampling and", "if"),
    Mutation("dynamic_sampling.py", "(group.rewards) == 0", "(group.rewards) != 0"),
    Mutation("dynamic_sampling.py", "return self.dynamic_sampling or", "return"),
]
OF_BOTH = [
    Mutation("surrogate.py", "Field(gt=1)] = 2.0", "Field(gt=1)] = 3.0"),
    Mutation("surrogate.py", "losses = losses * importance_w", "losses = losses / importance_w"),
    Mutation("surrogate.py", "losses = losses * importance_w", "losses = importance_w"),
    Mutation("estimators.py", "torch.exp(old - inference", "torch.exp(inference"),
]
IMPORTANCE_MUTATIONS = {
    "truncated": [
        *OF_BOTH,
        Mutation("surrogate.py", "ratio, self.importance_correction,", "ratio, 'masked',"),
        Mutation("estimators.py", "ratio.clamp(max=cap)", "ratio.clamp(min=cap)"),
        Mutation("estimators.py", "ratio.clamp(max=cap)", "ratio"),
    ],
    "masked": [
        *OF_BOTH,
        Mutation("surrogate.py", "ratio, self.importance_correction,", "ratio, 'truncated',"),
        Mutation("estimators.py", "cap), ratio, 0.0)", "cap), 1.0, 0.0)"),
        Mutation("estimators.py", "cap), ratio, 0.0)", "cap), ratio, 1.0)"),
        Mutation("estimators.py", "ratio >= 1 / cap", "ratio >= 0"),
        Mutation("estimators.py", "ratio >= 1 / cap", "ratio <= 1 / cap"),
        Mutation("estimators.py", "ratio <= cap", "ratio >= 0"),
        Mutation("estimators.py", "ratio <= cap", "ratio >= cap"),
    ],
}


@cache
def batches() -> Batches:
    return random_batches(30, seed=1)


def check(recipes: ModuleType, name: str) -> None:
    check_recipe(recipes, CASES[name], batches())


def test_a_copy_without_a_mutation_passes() -> None:
    with copied_package() as copy:
        for name in CASES:
            check(copy, name)


def test_every_case_has_mutations() -> None:
    assert set(MUTATIONS) == set(CASES)


@pytest.mark.parametrize(
    ("name", "mutation"), [(name, m) for name, rows in MUTATIONS.items() for m in rows], ids=str
)
def test_a_mutation_is_found(name: str, mutation: Mutation) -> None:
    assert_killed(mutation, partial(check, name=name))


# ---- what the transcriptions do not have ---------------------------------------------------------


def check_dapo_groups(recipes: ModuleType) -> None:
    """The punishment by hand, 4 of 20 tokens; groups that are replaced, by their raw rewards."""
    run = recipes.RunSettings(max_tokens=20, num_generations=4, temperature=1.0, seed=0)
    uneven, flat = (group_of([15, 16, 18, 20], r) for r in ([1.0, 0.0, 1.0, 0.0], [1.0] * 4))
    np.testing.assert_allclose(recipes.DAPO().rewards(uneven, run), [1.0, 0.0, 0.5, -1.0])
    for replaces in (recipes.DAPO(), recipes.TwoSided(), recipes.GRPO(dynamic_sampling=True)):
        assert replaces.rejects
        assert replaces.accepts(flat, run) is not None and replaces.accepts(uneven, run) is None
    assert recipes.GRPO().accepts(flat, run) is None and not recipes.GRPO().rejects


def group_of(lengths: list[int], rewards: list[float]) -> RolloutGroup:
    made = random_group(np.random.default_rng(0), 2, lengths)
    return replace(made, scores=tuple(Score(reward, {}) for reward in rewards))


def check_importance(recipes: ModuleType, correction: str) -> None:
    """GRPO's surrogate, each token times old policy / inference, in plain NumPy at most 2, or 0
    outside 1/2 and 2."""
    recipe = recipes.GRPO(kl_coef=0.0, importance_correction=correction)
    data = batches()
    row = packed(recipes, recipe, data)
    old = row.terms.old_logprobs
    inference = old + torch.from_numpy(np.random.default_rng(0).normal(0, 1, len(old)))
    terms = replace(row.terms, inference_logprobs=inference)
    importance = np.exp(old.numpy() - inference.numpy())
    if correction == "truncated":
        weights = np.minimum(importance, 2.0)
    else:
        weights = importance * ((0.5 <= importance) & (importance <= 2.0))
    plain = torch.from_numpy(weights) * ppo(data.ratio[row.places], terms.advantages, 0.2, 0.2)
    formula = -(terms.loss_weights * plain).sum()
    loss = recipe.loss(row.logprobs, row.entropy, terms).sum()
    torch.testing.assert_close(loss, formula, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, data.policy)[0] for x in (loss, formula)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_copy_has_dapo_s_groups_and_the_importance_weights() -> None:
    with copied_package() as copy:
        check_dapo_groups(copy)
        for correction in IMPORTANCE_MUTATIONS:
            check_importance(copy, correction)


@pytest.mark.parametrize("mutation", DAPO_GROUP_MUTATIONS, ids=str)
def test_a_mutation_of_dapo_s_groups_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_dapo_groups)


@pytest.mark.parametrize(
    ("correction", "mutation"),
    [(correction, m) for correction, rows in IMPORTANCE_MUTATIONS.items() for m in rows],
    ids=str,
)
def test_a_mutation_of_the_importance_weights_is_found(correction: str, mutation: Mutation) -> None:
    assert_killed(mutation, partial(check_importance, correction=correction))
