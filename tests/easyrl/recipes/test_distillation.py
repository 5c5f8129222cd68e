"""What distillation's gradient is, by enumeration of all responses; TRL's loss; what is refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.config.file import dump_config, load_config
from easyrl.kernels.logprobs.linear_divergence import TeacherRows, linear_divergences
from easyrl.recipes import Terms
from easyrl.recipes.distillation import Distillation
from easyrl.recipes.loading import load_recipe, notices, with_whole_recipe
from easyrl.schema import SampleKey
from tests.peers import peer

VOCAB, LONGEST, END = 3, 3, 0  # a response ends with token 0, or after three tokens
Prefix = tuple[int, ...]


def responses() -> list[Prefix]:
    """All of them: their probabilities add up to one."""
    found = []
    for length in range(1, LONGEST + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == END or length == LONGEST
            if ends and END not in tokens[:-1]:
                found.append(tokens)
    return found


PREFIXES = sorted({tokens[:t] for tokens in responses() for t in range(len(tokens))})


@dataclass(frozen=True)
class Table:
    """A policy with logits of its own behind each prefix."""

    logits: Tensor  # [prefixes, V]

    @classmethod
    def random(cls, seed: int) -> Table:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(PREFIXES), VOCAB, generator=generator, dtype=torch.float64)
        return cls(logits.requires_grad_())

    def logprobs(self, tokens: Prefix) -> Tensor:
        """[R], of each token behind those before it."""
        rows = [PREFIXES.index(tokens[:t]) for t in range(len(tokens))]
        return self.logits.log_softmax(-1)[rows, list(tokens)]

    def divergences(self, teacher: Table, tokens: Prefix) -> Tensor:
        """[R], KL over the vocabulary at each of them."""
        own, its = self.logits.log_softmax(-1), teacher.logits.log_softmax(-1)
        whole = (own.exp() * (own - its)).sum(-1)
        return whole[[PREFIXES.index(tokens[:t]) for t in range(len(tokens))]]


def loss_of(recipe: Distillation, policy: Table, old: Table, teacher: Table, y: Prefix) -> Tensor:
    """The recipe's loss sum of one response."""
    logprobs, old_logprobs = policy.logprobs(y), old.logprobs(y).detach()
    is_full = recipe.divergence == "full"
    terms = Terms(
        advantages=torch.zeros(len(y), dtype=torch.float64),
        loss_weights=torch.ones(len(y), dtype=torch.float64),
        inference_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        reference_logprobs=None,
        sequence_index=torch.zeros(len(y), dtype=torch.int64),
        sequences=(SampleKey(0, 0, 0),),
        teacher_logprobs=None if is_full else teacher.logprobs(y).detach(),
        teacher_kl=policy.divergences(teacher, y) if is_full else None,
    )
    return recipe.loss(logprobs, torch.zeros_like(logprobs), terms).sum()


def expected_gradient(recipe: Distillation, policy: Table, old: Table, teacher: Table) -> Tensor:
    """Over all responses, sampled by ``old``."""
    total = sum(
        old.logprobs(y).sum().exp().detach() * loss_of(recipe, policy, old, teacher, y)
        for y in responses()
    )
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, policy.logits)[0]


def gradient_of_whole_responses(policy: Table, teacher: Table) -> Tensor:
    """Of the KL between the distributions of responses."""
    kl = policy.logits.new_zeros(())
    for y in responses():
        logp, its = policy.logprobs(y).sum(), teacher.logprobs(y).sum()
        kl = kl + logp.exp() * (logp - its)
    return torch.autograd.grad(kl, policy.logits)[0]


def gradient_of_positions(policy: Table, old: Table, teacher: Table) -> Tensor:
    """Of each position's KL, with the probability with which ``old`` gets there, as it is."""
    own, its = policy.logits.log_softmax(-1), teacher.logits.log_softmax(-1)
    there = torch.stack(
        [old.logprobs(p).sum().exp() if p else torch.ones(()).double() for p in PREFIXES]
    )
    kl = (there.detach() * (own.exp() * (own - its)).sum(-1)).sum()
    return torch.autograd.grad(kl, policy.logits)[0]


def recipe_of(**settings: Any) -> Distillation:
    return Distillation(teacher=Path("teacher"), **settings)


@pytest.fixture
def tables() -> tuple[Table, Table, Table]:
    return Table.random(0), Table.random(1), Table.random(2)


def test_the_responses_are_all_that_there_are() -> None:
    probabilities = [Table.random(0).logprobs(y).detach().sum().exp() for y in responses()]
    assert float(sum(probabilities)) == pytest.approx(1, rel=1e-12)
    assert {len(y) for y in responses()} == {1, 2, 3}


@pytest.mark.parametrize("divergence", ["sampled", "full"])
def test_credit_of_later_tokens_is_the_gradient_of_whole_responses(
    tables: tuple[Table, Table, Table], divergence: str
) -> None:
    policy, _, teacher = tables
    got = expected_gradient(
        recipe_of(divergence=divergence, credit="sequence"), policy, policy, teacher
    )
    expected = gradient_of_whole_responses(policy, teacher)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("divergence", ["sampled", "full"])
@pytest.mark.parametrize("moved_on", [False, True])
def test_credit_of_the_token_is_the_gradient_of_each_position(
    tables: tuple[Table, Table, Table], divergence: str, moved_on: bool
) -> None:
    """Also in later updates, at the positions to which the old policy gets."""
    policy, other, teacher = tables
    old = other if moved_on else policy
    got = expected_gradient(recipe_of(divergence=divergence), policy, old, teacher)
    expected = gradient_of_positions(policy, old, teacher)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    whole = gradient_of_whole_responses(policy, teacher)
    assert (got - whole).norm() > 0.05 * whole.norm()  # the two are told apart


def test_the_usual_mistake_has_no_gradient_in_expectation(
    tables: tuple[Table, Table, Table],
) -> None:
    """Differentiating the log-ratio itself (the docstring says so)."""
    policy, _, teacher = tables
    total = policy.logits.new_zeros(())
    for y in responses():
        logprobs = policy.logprobs(y)
        probability = logprobs.sum().exp().detach()
        total = total + probability * (logprobs - teacher.logprobs(y).detach()).sum()
    (gradient,) = torch.autograd.grad(total, policy.logits)
    assert gradient.abs().max() < 1e-14
    assert gradient_of_positions(policy, policy, teacher).abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("same_pass", [True, False])
def test_full_is_trl_s_generalized_jsd_at_beta_one(temperature: float, same_pass: bool) -> None:
    trl = peer("trl.experimental.gkd.gkd_trainer")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight = random(5, 7, 8).requires_grad_(), random(31, 8).requires_grad_()
    its = TeacherRows(random(35, 12), random(31, 12))
    labels = torch.randint(31, (5, 7), generator=generator)
    labels[torch.arange(7) >= torch.tensor([7, 3, 5, 1, 6])[:, None]] = -100
    kept = (labels != -100).flatten()
    theirs = trl.GKDTrainer.generalized_jsd_loss(
        hidden @ weight.T,
        (its.hidden @ its.weight.T).view(5, 7, 31),
        labels,
        beta=1,
        temperature=temperature,
    )

    recipe, size = recipe_of(divergence="full"), int(kept.sum())

    def losses(logprobs: Tensor, entropy: Tensor, rows: slice, divergence: Tensor) -> Tensor:
        ones = torch.ones_like(logprobs)
        terms = Terms(
            *(0 * ones, ones, ones, logprobs.detach(), None),
            sequence_index=torch.zeros(len(ones), dtype=torch.int64),
            sequences=(SampleKey(0, 0, 0),),
            teacher_kl=divergence,
        )
        return recipe.loss(logprobs, entropy, terms)

    got = linear_divergences(
        *(hidden.flatten(0, 1)[kept], weight, labels.flatten()[kept]),
        TeacherRows(its.hidden[kept], its.weight),
        losses if same_pass else None,
        temperature=temperature,
        chunk_size=4,
    )
    ours = got[0] if same_pass else losses(*got[:2], slice(0, size), got[2]).sum()
    torch.testing.assert_close(ours / size, theirs, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(x, [hidden, weight]) for x in (ours / size, theirs)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-14)


# ---- the configuration ---------------------------------------------------------------------------

MINIMAL = """
model: {path: models/tiny}
data: {files: [train.jsonl]}
inference: {endpoints: ["http://127.0.0.1:8000"]}
recipe: {name: distillation, teacher: models/teacher}
"""


def load(folder: Path, *overrides: str) -> Any:
    path = folder / "config.yaml"
    path.write_text(MINIMAL)
    return load_config(path, overrides)


def test_neither_rewards_nor_second_responses_are_needed(tmp_path: Path) -> None:
    config = load(tmp_path, "rollout.num_generations=1")
    assert config.rewards == []
    recipe = load_recipe(config)
    assert isinstance(recipe, Distillation) and recipe.teacher == Path("models/teacher")
    assert not notices(config, recipe)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(with_whole_recipe(config)))
    assert load_recipe(load_config(again)) == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe={name: distillation}"], "recipe.teacher: is required; give the folder"),
        (["recipe.divergence=exact"], "recipe.divergence: Input should be 'sampled' or 'full'"),
        (["recipe={name: grpo}"], "rewards: recipe grpo makes its advantages of rewards; add"),
        (
            ["recipe={name: grpo}", "rewards=[{name: exact}]", "rollout.num_generations=1"],
            "rollout.num_generations: a baseline needs at least 2 responses per group",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(load(tmp_path, *overrides))
    assert message in str(refused.value)


def test_an_evaluation_needs_rewards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation: has nothing to measure without rewards"):
        load(tmp_path, "evaluation={data: {files: [held.jsonl]}}")


@pytest.mark.parametrize(
    ("settings", "span", "old_policy", "scores"),
    [
        ({}, "token", True, True),
        ({"credit": "sequence"}, "sequence", True, True),
        ({"divergence": "full"}, "token", False, False),
        ({"divergence": "full", "credit": "sequence"}, "sequence", True, False),
    ],
)
def test_what_runs_beside_the_policy(
    settings: dict[str, str], span: str, old_policy: bool, scores: bool
) -> None:
    recipe = recipe_of(**settings)
    assert recipe.span == span and not recipe.advantage_only
    assert recipe.needs.old_policy == old_policy and not recipe.needs.reference
    assert recipe.needs.scores_with_teacher == scores
