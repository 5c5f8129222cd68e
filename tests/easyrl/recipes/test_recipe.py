"""What recipes make of groups: defaults, selection, masks, DAPO's rewards, per-token advantages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from easyrl.build.recipe import group_functions
from easyrl.config import Config
from easyrl.config.file import validate_config
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.recipes import DAPO, GRPO, DrGRPO, Recipe, RunSettings, Terms, group_advantages
from easyrl.recipes.groups import trained_groups
from easyrl.recipes.losses import terms_of
from easyrl.runtime.seeding import sample_seed
from easyrl.schema import NOTHING_SAID, FrozenLogprobs, RolloutGroup, Score, TrainedGroup
from tests.recipes import run_settings, token_grpo
from tests.tiny_models import random_group

RUN = run_settings(max_tokens=10)


def group(
    lengths: Sequence[int], rewards: Sequence[float] = (), *, index: int = 0, **settings: object
) -> RolloutGroup:
    made = random_group(np.random.default_rng(index), 3, list(lengths), index=index, **settings)  # type: ignore[arg-type]
    if not rewards:
        return made
    return replace(made, scores=tuple(Score(reward, {}) for reward in rewards))


class Plain(Recipe):
    """The defaults, and what has no default."""

    def advantages(self, groups, run, inputs):  # type: ignore[no-untyped-def]
        return [group.rewards for group in groups]

    def loss(self, logprobs, entropy, terms):  # type: ignore[no-untyped-def]
        return -terms.loss_weights * terms.advantages * logprobs


def test_defaults_train_all_tokens_alike() -> None:
    made = group([3, 0, 5], masked=0.4)
    (trained,) = trained_groups(Plain(), RUN, [made])
    masks = [completion.loss_mask for completion in made.completions]
    for response in trained.responses:
        assert response.tokens.tolist() == np.flatnonzero(masks[response.sample]).tolist()
        assert set(response.loss_weights.tolist()) == {1.0}
        assert set(response.advantages.tolist()) == {float(made.rewards[response.sample])}
    assert Plain().denominator([made], RUN) == sum(mask.sum() for mask in masks)
    assert Plain().accepts(made, RUN) is None and not Plain().advantage_only
    assert (Plain().scope, Plain().span) == ("group", "token")


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_selected_responses_alone_are_trained_and_counted(aggregation: str) -> None:
    @dataclass(frozen=True)
    class Last(GRPO):
        def select(self, group: RolloutGroup, run: object) -> Sequence[int]:
            return (2, 1)

    recipe = Last(aggregation=aggregation, mask_truncated=True)  # type: ignore[arg-type]
    made = group([3, 4, 6], truncated=(1,))
    (trained,) = trained_groups(recipe, RUN, [made])
    assert [response.sample for response in trained.responses] == [2]  # 1 is cut off
    expected = {"sequence": 1 / 6, "token": 1.0, "constant": 1 / 10}[aggregation]
    assert set(trained.responses[0].loss_weights.tolist()) == {expected}
    # the baseline is the whole group's
    advantage = group_advantages(made.rewards, "group_std")[2]
    assert set(trained.responses[0].advantages.tolist()) == {float(advantage)}
    denominator = {"sequence": 2, "token": 6, "constant": 2}[aggregation]
    assert recipe.denominator([made], RUN) == denominator


def test_advantages_per_token() -> None:
    class Growing(Plain):
        def advantages(self, groups, run, inputs):  # type: ignore[no-untyped-def]
            return [[np.arange(len(c.token_ids)) for c in g.completions] for g in groups]

    made = group([4, 2], masked=0.3)
    (trained,) = trained_groups(Growing(), RUN, [made])
    assert all(np.array_equal(r.advantages, r.tokens) for r in trained.responses)


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("advantages", [np.zeros(2)], "Wrong.advantages gave 2 for a group of 3 responses"),
        ("advantages", [np.zeros(3)] * 2, "Wrong.advantages gave 2 for 1"),
        ("token_weights", [np.ones(3)], "Wrong.token_weights gave 1 for a group of 3 responses"),
        ("select", (0, 0), r"Wrong.select gave \[0, 0\] for a group of 3 responses"),
        ("select", (3,), r"Wrong.select gave \[3\] for a group of 3 responses"),
        ("trained_tokens", np.ones(5, bool), "Wrong.trained_tokens has to be bool"),
        ("trained_tokens", np.ones(4), "Wrong.trained_tokens has to be bool"),
        ("advantages", [[np.zeros(5)] * 3], r"Wrong.advantages gave shape \(5,\) for 4 tokens"),
        ("token_weights", [np.ones(7)] * 3, r"Wrong.token_weights gave shape \(7,\) for 4 tokens"),
    ],
)
def test_what_does_not_fit_the_group_is_refused(method: str, value: object, message: str) -> None:
    wrong = type("Wrong", (Plain,), {method: lambda self, *_: value})
    with pytest.raises(ValueError, match=message):
        trained_groups(wrong(), RUN, [group([4, 4, 4])])


def test_a_token_that_the_policy_did_not_sample_is_not_trained() -> None:
    everything = type("All", (Plain,), {"trained_tokens": lambda self, c, _: c.loss_mask | True})
    with pytest.raises(ValueError, match="has to be bool .* within loss_mask"):
        trained_groups(everything(), RUN, [group([40, 40], masked=0.5)])


def test_groups_are_seen_one_by_one_unless_the_scope_is_the_batch() -> None:
    seen: list[int] = []

    class Counting(Plain):
        def advantages(self, groups, run, inputs):  # type: ignore[no-untyped-def]
            seen.append(len(groups))
            assert [len(r) for r in inputs.rewards] == [2] * (len(groups) + extra)
            return [g.rewards for g in groups]

    groups, extra = [group([2, 3], index=i) for i in range(3)], 0
    trained_groups(Counting(), RUN, groups)
    extra = 1
    whole = type("Whole", (Counting,), {"scope": "batch"})
    trained_groups(whole(), RUN, groups, [g.rewards for g in [*groups, groups[0]]])
    assert seen == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("recipe", "advantage_only"),
    [
        (token_grpo(), True),
        (DrGRPO(), True),
        (DAPO(), True),
        (token_grpo(importance_correction="truncated"), True),
        (token_grpo(kl_coef=0.1), False),
        (token_grpo(kl_in_reward_coef=0.1), False),
        (token_grpo(entropy_coef=-0.1), False),
    ],
)
def test_a_loss_without_another_term_is_known(recipe: GRPO, advantage_only: bool) -> None:
    assert recipe.advantage_only is advantage_only


# ---- DAPO ----------------------------------------------------------------------------------------


def test_overlong_punishment() -> None:
    """Eq. 13 of DAPO with L_max = 10 and L_cache = 4: none up to 6 tokens, -1 at 10."""
    recipe = DAPO(overlong_buffer=0.4)
    made = group([2, 6, 8, 10], [1.0, 1.0, 0.0, 1.0])
    assert recipe.rewards(made, RUN).tolist() == [1.0, 1.0, -0.5, 0.0]
    expected = group_advantages(np.array([1.0, 1.0, -0.5, 0.0], np.float32), "group_std")
    (trained,) = trained_groups(recipe, RUN, [made])
    got = [response.advantages[0] for response in trained.responses]
    assert got == pytest.approx(expected, rel=1e-6)
    without = DAPO(overlong_buffer=0.0)
    assert without.rewards(made, RUN).tolist() == made.rewards.tolist()
    half = DAPO(overlong_buffer=0.4, overlong_penalty=0.5)
    assert half.rewards(made, RUN).tolist() == [1.0, 1.0, -0.25, 0.5]


def test_dynamic_sampling_looks_at_raw_rewards() -> None:
    flat = group([2, 10], [1.0, 1.0])
    assert DAPO().accepts(flat, RUN) == "all rewards are equal"
    assert DAPO().accepts(group([2, 2], [1.0, 0.0]), RUN) is None
    assert DAPO(dynamic_sampling=False).accepts(flat, RUN) is None
    assert GRPO().accepts(flat, RUN) is None
    assert DAPO().rewards(flat, RUN).tolist() == [1.0, 0.0]  # though it would have a signal


# ---- the control experiment ----------------------------------------------------------------------


def config(**settings: object) -> Config:
    return validate_config(
        {
            "model": {"path": "models/tiny"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"aggregation": "token", "kl_coef": 0.0},
        }
        | settings
    )


def test_shuffled_rewards_are_permuted_inside_their_group_before_the_recipe_sees_them() -> None:
    made = group([2] * 8, [float(i) for i in range(8)], index=5)
    functions = group_functions(config(scoring={"shuffle_rewards": True}, run={"seed": 3}))
    shuffled = functions.scored(made)
    # as it always was: the same numbers for the same seed
    key = sample_seed(3, made.prompt.epoch, made.prompt.index, -1)
    expected = np.random.default_rng(key).permutation(made.rewards)
    assert shuffled.rewards.tolist() == expected.tolist() != made.rewards.tolist()
    assert made.rewards.tolist() == list(range(8))
    (trained,) = functions.trained([shuffled], ())
    got = [response.advantages[0] for response in trained.responses]
    assert got == group_advantages(expected, "group_std").tolist()
    assert group_functions(config()).scored(made) is made


def test_a_group_can_have_the_rewards_of_the_prompt_before_it() -> None:
    scoring = {"shuffle_rewards": "across_prompts"}
    scored = group_functions(config(scoring=scoring, run={"seed": 3})).scored
    rewards = [[float(10 * index + i) for i in range(8)] for index in range(3)]
    made = [group([2] * 8, own, index=index) for index, own in enumerate(rewards)]
    first, *others = [scored(one) for one in made]
    within = group_functions(config(scoring={"shuffle_rewards": True}, run={"seed": 3})).scored
    assert first == within(made[0]) != made[0]
    assert [one.rewards.tolist() for one in others] == rewards[:2]
    assert [one.completions for one in others] == [one.completions for one in made[1:]]
    with pytest.raises(ValueError, match=r"prompt 7 of epoch 0 has 2 responses, the one before 8"):
        scored(group([2, 2], [0, 1], index=7))


def test_only_a_group_s_mean_hides_that_a_prompt_s_own_rewards_were_permuted() -> None:
    """Over all permutations inside groups, the mean advantage of each response.

    With the group's mean as baseline it is 0; with the batch's, it is above 0 for the group that
    has more right responses: what ``across_prompts`` is for.
    """
    rewards = [np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])]
    means = {}
    for name in ("reinforce_pp_baseline", "reinforce_pp"):
        functions = group_functions(config(recipe={"name": name}))
        advantages = []
        for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
            own = [r[list(order)] for r, order in zip(rewards, orders, strict=True)]
            groups = [group([1] * 3, list(r), index=i) for i, r in enumerate(own)]
            batch = [functions.batch_rewards(one, NOTHING_SAID) for one in groups]
            trained = functions.trained(groups, batch, [NOTHING_SAID] * 2)
            advantages.append([[float(r.advantages[0]) for r in one.responses] for one in trained])
        means[name] = np.mean(advantages, axis=0)
    assert np.abs(means["reinforce_pp_baseline"]).max() < 1e-6
    assert means["reinforce_pp"][0].min() > 0.3 and means["reinforce_pp"][1].max() < -0.3


def test_has_signal() -> None:
    functions = group_functions(config())
    flat, other = functions.trained([group([2, 3], [1, 1]), group([2, 3], [0, 1])], ())
    assert not flat.has_signal and other.has_signal
    assert not TrainedGroup(flat.group, ()).has_signal


# ---- terms ---------------------------------------------------------------------------------------


def test_terms_know_sequence_and_group_and_can_be_sliced() -> None:
    groups = [group([2, 1], index=0), group([1, 2], index=1)]
    trained = trained_groups(Plain(), RUN, groups)
    (row,) = pack_groups(trained, max_tokens_per_micro_batch=100)
    logprobs = torch.arange(6.0, dtype=torch.float64)
    frozen = FrozenLogprobs(reference=None, old_policy=None)
    terms = terms_of(row, frozen, logprobs)
    assert terms.sequence_index.tolist() == [0, 0, 1, 2, 3, 3]
    assert terms.group_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert terms.old_logprobs.equal(logprobs) and terms.reference_logprobs is None
    assert terms.advantages.dtype == torch.float64
    part, again = terms[2:4], terms_of(row, frozen, logprobs[2:4], slice(2, 4))
    assert part.group_index.tolist() == again.group_index.tolist() == [0, 1]
    assert part.advantages.equal(again.advantages) and part.old_logprobs.equal(logprobs[2:4])
    old = FrozenLogprobs(reference=logprobs + 1, old_policy=logprobs - 1)
    other = terms_of(row, old, logprobs[2:4], slice(2, 4))
    assert other.old_logprobs.tolist() == [1.0, 2.0]
    assert other.reference_logprobs is not None and other.reference_logprobs.tolist() == [3.0, 4.0]


def test_a_class_that_changes_the_loss_is_not_taken_for_advantage_only() -> None:
    @dataclass(frozen=True)
    class WithBonus(GRPO):
        def loss(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> Tensor:
            return super().loss(logprobs, entropy, terms) - logprobs

    assert GRPO(kl_coef=0.0).advantage_only
    assert not WithBonus(kl_coef=0.0).advantage_only


def test_dapo_rejects_by_a_decision_of_its_own_class_too() -> None:
    class Picky(DAPO):
        def accepts(self, group: RolloutGroup, run: RunSettings) -> str | None:
            return "none is good enough"

    assert DAPO().rejects and not DAPO(dynamic_sampling=False).rejects
    assert Picky(dynamic_sampling=False).rejects and not GRPO().rejects
