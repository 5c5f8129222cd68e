"""SFT and DPO: loss, gradient and metrics against their formulas on padded tensors, and TRL's DPO.

In fp64, on 1,000 random ragged groups each, packed so that many share a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import easyrl.recipes
import easyrl.recipes.groups
import easyrl.recipes.losses
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.dataloaders.packing.row import dummy_micro_batch
from easyrl.recipes import DPO, RPO, SFT, OnlineDPO, Recipe, RunSettings
from easyrl.recipes.losses import policy_loss
from easyrl.schema import Completion, FrozenLogprobs, MicroBatch, Prompt, RolloutGroup
from tests.easyrl.recipes.mutations import Mutation, assert_killed, copied_package
from tests.peers import peer

NUM_GROUPS, LONGEST, ROW = 1000, 9, 16
RUN = RunSettings(LONGEST, 2, temperature=1.0, seed=0)


@dataclass(frozen=True)
class Padded:
    """Two completions of each of P prompts; floating tensors are float64 [P, 2, LONGEST]."""

    groups: list[RolloutGroup]
    mask: Tensor  # bool, trained tokens
    policy: Tensor  # log-probabilities; carries gradient
    reference: Tensor


def padded(seed: int, num_groups: int = NUM_GROUPS) -> Padded:
    rng = np.random.default_rng(seed)
    mask = np.zeros((num_groups, 2, LONGEST), bool)
    groups = []
    for index in range(num_groups):
        completions = []
        for sample in range(2):
            length = int(rng.integers(1, LONGEST + 1))
            trained = rng.random(length) < 0.7
            trained[-1] = True
            mask[index, sample, :length] = trained
            token_ids = rng.integers(1, 50, length, dtype=np.int32)
            zeros = np.zeros(length, np.float32)
            completions.append(Completion(token_ids, zeros, "stop", (), "", trained))
        prompt = Prompt(index, rng.integers(1, 50, 4, dtype=np.int32), "", None)
        groups.append(RolloutGroup(prompt, tuple(completions), (), "", 0.0, 0.0))
    policy = torch.tensor(-3 * rng.random(mask.shape)).requires_grad_()
    return Padded(groups, torch.tensor(mask), policy, torch.tensor(-3 * rng.random(mask.shape)))


def rows_of(
    recipes: ModuleType, recipe: Any, batch: Padded
) -> Iterator[tuple[MicroBatch, Tensor, Any]]:
    """Each packed row with its tokens' log-probabilities and the terms of its loss."""
    trained = recipes.groups.trained_groups(recipe, RUN, batch.groups)
    whole = recipe.span == "group"
    for row in pack_groups(trained, max_tokens_per_micro_batch=ROW, whole_groups=whole):
        keys = [row.sequences[i] for i in row.sequence_index.tolist()]
        seen: dict[Any, int] = defaultdict(int)
        places = []
        for key in keys:
            own = batch.groups[key.prompt].completions[key.sample].loss_mask
            places.append((key.prompt, key.sample, int(np.flatnonzero(own)[seen[key]])))
            seen[key] += 1
        index = tuple(torch.tensor(places).T)
        frozen = FrozenLogprobs(batch.reference[index] if recipe.needs.reference else None, None)
        logprobs = batch.policy[index]
        yield row, logprobs, recipes.losses.terms_of(row, frozen, logprobs)


def packed_loss(recipes: ModuleType, recipe: Any, batch: Padded, weight: float = 1.0) -> Tensor:
    """The loss of one optimizer step, summed over rows; each token's weight times ``weight``."""
    loss = torch.zeros((), dtype=torch.float64)
    for _, logprobs, terms in rows_of(recipes, recipe, batch):
        terms = replace(terms, loss_weights=weight * terms.loss_weights)
        loss = loss + recipe.loss(logprobs, torch.zeros_like(logprobs), terms).sum()
    return loss / recipe.denominator(batch.groups, RUN)


def assert_same(batch: Padded, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-12)  # weights are float32
    gradients = [
        torch.autograd.grad(loss, batch.policy, retain_graph=True)[0] for loss in (got, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


def dpo_formula(batch: Padded, beta: float, smoothing: float) -> Tensor:
    """Eq. 7, and cDPO's mixture of both directions."""
    ratios = (batch.mask * (batch.policy - batch.reference)).sum(-1)
    margins = beta * (ratios[:, 0] - ratios[:, 1])
    return -((1 - smoothing) * logsigmoid(margins) + smoothing * logsigmoid(-margins)).mean()


def check_dpo(recipes: ModuleType) -> None:
    batch = padded(seed=1)
    for settings, beta, smoothing in (
        ({}, 0.1, 0.0),
        ({"beta": 0.7}, 0.7, 0.0),
        ({"beta": 0.7, "label_smoothing": 0.2}, 0.7, 0.2),
    ):
        recipe = recipes.DPO(**settings)
        expected = dpo_formula(batch, beta, smoothing)
        assert_same(batch, packed_loss(recipes, recipe, batch), expected)
        assert_same(batch, packed_loss(recipes, recipe, batch, weight=3.0), 3 * expected)


def check_dpo_metrics(recipes: ModuleType) -> None:
    batch, recipe = padded(seed=2, num_groups=100), recipes.DPO(beta=0.3)
    counted: dict[str, float] = defaultdict(float)
    for _, logprobs, terms in rows_of(recipes, recipe, batch):
        said = recipe.metrics(logprobs.detach(), torch.zeros_like(logprobs), terms)
        for name, value in said.items():
            counted[name] += float(value)
    rewards = 0.3 * (batch.mask * (batch.policy - batch.reference)).sum(-1).detach()
    margins = rewards[:, 0] - rewards[:, 1]
    expected = {
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "chosen_reward": rewards[:, 0].mean(),
        "rejected_reward": rewards[:, 1].mean(),
    }
    assert 0.2 < expected["accuracy"] < 0.8
    for name, value in expected.items():
        assert counted[f"{name}_num"] == 100
        assert counted[f"{name}_sum"] / 100 == pytest.approx(float(value), rel=1e-6)


def check_sft(recipes: ModuleType) -> None:
    batch = padded(seed=3)
    nll = -(batch.mask * batch.policy).sum(-1)
    lengths = batch.mask.sum(-1)
    for settings, expected in (
        ({}, nll.sum() / lengths.sum()),
        ({"aggregation": "token"}, nll.sum() / lengths.sum()),
        ({"aggregation": "sequence"}, (nll / lengths).mean()),
    ):
        recipe = recipes.SFT(**settings)
        assert_same(batch, packed_loss(recipes, recipe, batch), expected)
        assert_same(batch, packed_loss(recipes, recipe, batch, weight=3.0), 3 * expected)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    with copied_package() as copy:
        check_sft(copy)


def test_dpo_is_equation_7() -> None:
    with copied_package() as copy:
        check_dpo(copy)


def test_what_dpo_reports_is_of_pairs() -> None:
    with copied_package() as copy:
        check_dpo_metrics(copy)


SFT_MUTATIONS = [
    Mutation("sft.py", "-terms.loss_weights * logprobs", "terms.loss_weights * logprobs"),
    Mutation("sft.py", "-terms.loss_weights * logprobs", "-logprobs"),
    Mutation("sft.py", '"sequence"] = "token"', '"sequence"] = "sequence"'),
    Mutation("aggregated.py", 'if self.aggregation == "token"', 'if self.aggregation != "token"'),
    Mutation(
        "aggregated.py",
        "float(sum(len(self.select(group, run)) for group in groups))",
        "float(len(groups))",
    ),
]
DPO_MUTATIONS = [
    Mutation("dpo.py", "np.array([1.0, -1.0])", "np.array([-1.0, 1.0])"),
    Mutation("preference.py", "beta: PositiveFloat = 0.1", "beta: PositiveFloat = 0.2"),
    Mutation("dpo.py", "= 0.0  # epsilon", "= 0.1  # epsilon"),
    Mutation("preference.py", "(logprobs - terms.reference_logprobs)", "logprobs"),
    Mutation("dpo.py", "-(1 - self.label_smoothing) *", "-(1 + self.label_smoothing) *"),
    Mutation("dpo.py", "losses - self.label_smoothing *", "losses + self.label_smoothing *"),
    Mutation("dpo.py", "logsigmoid(-margins)", "logsigmoid(margins)"),
    Mutation("preference.py", "return float(len(groups))", "return float(2 * len(groups))"),
    Mutation("preference.py", "losses = weights * self", "losses = self"),
    Mutation("preference.py", 'return "group"', 'return "sequence"'),
    Mutation("preference.py", "Models(reference=True)", "Models(reference=False)"),
]
METRIC_MUTATIONS = [
    Mutation("preference.py", "(margins > 0)", "(margins < 0)"),
    Mutation("preference.py", "terms.advantages > 0", "terms.advantages < 1"),
    Mutation("preference.py", "is_pair.to(margins).sum()", "margins.new_tensor(len(logprobs))"),
]


@pytest.mark.parametrize("mutation", SFT_MUTATIONS, ids=str)
def test_a_mutation_of_sft_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_sft)


@pytest.mark.parametrize("mutation", DPO_MUTATIONS, ids=str)
def test_a_mutation_of_dpo_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_dpo)


@pytest.mark.parametrize("mutation", METRIC_MUTATIONS, ids=str)
def test_a_mutation_of_dpo_s_metrics_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_dpo_metrics)


@pytest.mark.parametrize(
    "recipe", [SFT(), DPO(), OnlineDPO(), RPO()], ids=lambda recipe: type(recipe).__name__
)
def test_a_rank_without_work_adds_nothing(recipe: Recipe) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    entropy = torch.ones(1, requires_grad=True)
    reference = torch.tensor([-2.0]) if recipe.needs.reference else None
    tri = SimpleNamespace(
        logprobs=logprobs,
        entropy=entropy,
        frozen=FrozenLogprobs(reference, None),
        teacher_kl=None,
    )
    loss, sums = policy_loss(tri, dummy_micro_batch(), recipe)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None and not logprobs.grad.any()
    assert not sums.sums


def test_nothing_is_compared_with_a_server() -> None:
    """Given completions have no log-probabilities of a server's."""
    batch, recipe = padded(seed=5, num_groups=3), SFT()
    for row, logprobs, _ in rows_of(easyrl.recipes, recipe, batch):
        tri = SimpleNamespace(
            logprobs=logprobs,
            entropy=torch.zeros_like(logprobs),
            frozen=FrozenLogprobs(None, None),
            sampling_policy=logprobs,
            teacher_kl=None,
        )
        _, sums = policy_loss(tri, row, recipe)  # type: ignore[arg-type]
        assert not sums.compared and not sums.maxima
        assert set(sums.sums) == {"loss_sum", "entropy_sum", "num_loss_tokens", "num_sequences"}


# ---- TRL -----------------------------------------------------------------------------------------


def trl_loss(batch: Padded, beta: float) -> tuple[Tensor, dict[str, list[float]]]:
    """Of TRL's own ``DPOTrainer._compute_loss``, called with given numbers; and what it logs."""
    trl = peer("trl.trainer.dpo_trainer")

    def stacked(values: Tensor) -> Tensor:  # chosen, then rejected
        return torch.cat([values[:, 0], values[:, 1]])

    mask = stacked(batch.mask)
    one = torch.zeros_like(mask[:, :1])  # a token of the prompt
    completion_mask = torch.cat([one, mask], dim=1).long()
    logprobs = stacked(batch.policy) * mask
    zeros = torch.zeros_like(logprobs)
    reference = (stacked(batch.reference) * mask).sum(1).chunk(2)

    def model(**inputs: Any) -> SimpleNamespace:
        assert inputs["labels"].shape == completion_mask.shape
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=mask)

    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "input_ids": completion_mask,
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    loss = trl.DPOTrainer._compute_loss(fake, model, inputs, return_outputs=False)
    return loss, fake._metrics["train"]


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_loss_gradient_and_metrics_are_trl_s(beta: float) -> None:
    batch = padded(seed=7, num_groups=200)
    expected, logged = trl_loss(batch, beta)
    recipe = DPO(beta=beta)
    assert_same(batch, packed_loss(easyrl.recipes, recipe, batch), expected)
    counted: dict[str, float] = defaultdict(float)
    for _, logprobs, terms in rows_of(easyrl.recipes, recipe, batch):
        said = recipe.metrics(logprobs.detach(), torch.zeros_like(logprobs), terms)
        for name, value in said.items():
            counted[name] += float(value)
    for ours, theirs in (
        ("accuracy", "rewards/accuracies"),
        ("margin", "rewards/margins"),
        ("chosen_reward", "rewards/chosen"),
        ("rejected_reward", "rewards/rejected"),
    ):
        assert counted[f"{ours}_sum"] / 200 == pytest.approx(logged[theirs][0], rel=1e-6)


def test_another_beta_is_not_trl_s() -> None:
    batch = padded(seed=7, num_groups=50)
    expected, _ = trl_loss(batch, 0.1)
    with pytest.raises(AssertionError):
        assert_same(batch, packed_loss(easyrl.recipes, DPO(beta=0.11), batch), expected)
