"""SFT and DPO: loss, gradient and metrics against their formulas on padded tensors, and TRL's DPO.

In fp64, on 1,000 random ragged batches, each with a denominator of its own, packed so that groups
share a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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

NUM_BATCHES, LONGEST, ROW = 1000, 9, 16
FEW = 60  # batches, for a mutation
RUN = RunSettings(LONGEST, 2, temperature=1.0, seed=0)


@dataclass(frozen=True)
class Padded:
    """Two completions of each of P prompts; floating tensors are float64 [P, 2, LONGEST]."""

    groups: list[RolloutGroup]
    mask: Tensor  # bool, trained tokens
    policy: Tensor  # log-probabilities; carries gradient
    reference: Tensor
    batch: Tensor  # int64 [P], of which of B batches each prompt is, in order

    @property
    def batches(self) -> list[list[RolloutGroup]]:
        groups = iter(self.groups)
        return [[next(groups) for _ in range(size)] for size in self.batch.bincount().tolist()]

    def sums(self, values: Tensor) -> Tensor:
        """[B], of ``values`` [P]."""
        return values.new_zeros(int(self.batch.max()) + 1).index_add(0, self.batch, values)


def ragged(seed: int, num_batches: int) -> Padded:
    """Batches of one, two or three prompts."""
    return padded(seed, np.random.default_rng(seed).integers(1, 4, num_batches).tolist())


def padded(seed: int, sizes: Sequence[int]) -> Padded:
    """``sizes``: prompts of each batch."""
    num_groups = sum(sizes)
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
    reference = torch.tensor(-3 * rng.random(mask.shape))
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Padded(groups, torch.tensor(mask), policy, reference, batch)


def rows_of(
    recipes: ModuleType, recipe: Any, batch: Padded
) -> Iterator[tuple[int, MicroBatch, Tensor, Any]]:
    """Each batch's number and packed rows, with their tokens' log-probabilities and terms."""
    rows: list[tuple[int, MicroBatch]] = []
    places: list[list[tuple[int, int, int]]] = []
    whole = recipe.span == "group"
    for number, groups in enumerate(batch.batches):
        trained = recipes.groups.trained_groups(recipe, RUN, groups)
        for row in pack_groups(trained, max_tokens_per_micro_batch=ROW, whole_groups=whole):
            seen: dict[Any, int] = defaultdict(int)
            rows.append((number, row))
            places.append([])
            for key in (row.sequences[i] for i in row.sequence_index.tolist()):
                own = batch.groups[key.prompt].completions[key.sample].loss_mask
                places[-1].append((key.prompt, key.sample, int(np.flatnonzero(own)[seen[key]])))
                seen[key] += 1
    # at once: the gradient of each row by itself would be as large as all batches
    index = tuple(torch.tensor([place for own in places for place in own]).T)
    lengths = [len(own) for own in places]
    logprobs, reference = (x[index].split(lengths) for x in (batch.policy, batch.reference))
    for (number, row), own, said in zip(rows, logprobs, reference, strict=True):
        frozen = FrozenLogprobs(said if recipe.needs.reference else None, None)
        yield number, row, own, recipes.losses.terms_of(row, frozen, own)


def packed_loss(recipes: ModuleType, recipe: Any, batch: Padded, weight: float = 1.0) -> Tensor:
    """[B], each batch's loss, summed over its rows; each token's weight times ``weight``."""
    losses = [torch.zeros((), dtype=torch.float64) for _ in batch.batches]
    for number, _, logprobs, terms in rows_of(recipes, recipe, batch):
        terms = replace(terms, loss_weights=weight * terms.loss_weights)
        loss = recipe.loss(logprobs, torch.zeros_like(logprobs), terms).sum()
        losses[number] = losses[number] + loss
    denominators = [recipe.denominator(groups, RUN) for groups in batch.batches]
    return torch.stack(losses) / torch.tensor(denominators, dtype=torch.float64)


def assert_same(batch: Padded, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-12)  # weights are float32
    gradients = [
        torch.autograd.grad(loss.sum(), batch.policy, retain_graph=True)[0]
        for loss in (got, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


def dpo_formula(batch: Padded, beta: float, smoothing: float) -> Tensor:
    """[B], eq. 7, and cDPO's mixture of both directions."""
    ratios = (batch.mask * (batch.policy - batch.reference)).sum(-1)
    margins = beta * (ratios[:, 0] - ratios[:, 1])
    losses = (1 - smoothing) * logsigmoid(margins) + smoothing * logsigmoid(-margins)
    return -batch.sums(losses) / batch.batch.bincount()


def check_dpo(recipes: ModuleType, num_batches: int = FEW) -> None:
    batch = ragged(1, num_batches)
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
    batch, recipe = padded(2, [100]), recipes.DPO(beta=0.3)
    counted: dict[str, float] = defaultdict(float)
    for _, _, logprobs, terms in rows_of(recipes, recipe, batch):
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


def check_sft(recipes: ModuleType, num_batches: int = FEW) -> None:
    batch = ragged(3, num_batches)
    nll = -(batch.mask * batch.policy).sum(-1)
    lengths = batch.mask.sum(-1)
    of_tokens = batch.sums(nll.sum(-1)) / batch.sums(lengths.sum(-1))
    of_completions = batch.sums((nll / lengths).mean(-1)) / batch.batch.bincount()
    for settings, expected in (
        ({}, of_tokens),
        ({"aggregation": "token"}, of_tokens),
        ({"aggregation": "sequence"}, of_completions),
    ):
        recipe = recipes.SFT(**settings)
        assert_same(batch, packed_loss(recipes, recipe, batch), expected)
        assert_same(batch, packed_loss(recipes, recipe, batch, weight=3.0), 3 * expected)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    with copied_package() as copy:
        check_sft(copy, NUM_BATCHES)


def test_dpo_is_equation_7() -> None:
    with copied_package() as copy:
        check_dpo(copy, NUM_BATCHES)


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
    batch, recipe = padded(5, [3]), SFT()
    for _, row, logprobs, _ in rows_of(easyrl.recipes, recipe, batch):
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
    batch = padded(7, [200])
    expected, logged = trl_loss(batch, beta)
    recipe = DPO(beta=beta)
    assert_same(batch, packed_loss(easyrl.recipes, recipe, batch), expected[None])
    counted: dict[str, float] = defaultdict(float)
    for _, _, logprobs, terms in rows_of(easyrl.recipes, recipe, batch):
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
    batch = padded(7, [50])
    expected, _ = trl_loss(batch, 0.1)
    with pytest.raises(AssertionError):
        assert_same(batch, packed_loss(easyrl.recipes, DPO(beta=0.11), batch), expected[None])
