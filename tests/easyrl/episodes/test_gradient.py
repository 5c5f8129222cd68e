"""The gradient of an episode tree is that of its branches, each trained by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from easyrl.completion_check import completion_problem
from easyrl.dataloaders.packing.groups import Packing, pack_groups
from easyrl.models.policy_model import run_micro_batch
from easyrl.recipes import TurnGRPO
from easyrl.recipes.groups import trained_group, trained_groups
from tests.any_models import save_any_model
from tests.easyrl.episodes.trees import episode, group, typical
from tests.easyrl.models.test_any_model import BOUND, load, no_casts, plain
from tests.recipes import run_settings, token_grpo

__all__ = ["no_casts"]  # a fixture

TEMPERATURE = 0.7
ADVANTAGES = np.array([1.5, -0.5])


def logged_episodes():
    """Two samples of a group; they share their first prompt."""
    rng = np.random.default_rng(4)
    return [typical(rng, [10, 11, 12, 13]), typical(rng, [10, 11, 12, 13])]


def of_rows(path: Path, packing: Packing, budget: int):
    """Gradients of packed rows, and how many tokens went through the model."""
    model = load(path, "auto")
    made = group(*(episode(*logged) for logged in logged_episodes()))
    trained = trained_group(token_grpo(), made, ADVANTAGES, run_settings())
    rows = pack_groups([trained], max_tokens_per_micro_batch=budget, packing=packing)
    for row in rows:
        logprobs, _ = run_micro_batch(model, row, TEMPERATURE)
        weights = (row.loss_weights * row.advantages).to(logprobs.dtype)
        (weights * logprobs).sum().backward()
    gradients = {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}
    return gradients, sum(row.num_tokens for row in rows), len(rows)


def by_themselves(path: Path):
    """The same of a plain Hugging Face model: each request of the log on its own."""
    model = plain(path)
    num_tokens = 0
    for logged, advantage in zip(logged_episodes(), ADVANTAGES, strict=True):
        for each in logged:
            ids = torch.tensor([each.prompt + each.sampled])
            num_tokens += ids.numel()
            logits = model(ids).logits[0, len(each.prompt) - 1 : -1] / TEMPERATURE
            picked = logits.log_softmax(-1).gather(1, torch.tensor(each.sampled)[:, None])
            (float(advantage) * picked.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}, num_tokens


@pytest.mark.parametrize(
    ("packing", "budget"), [("tree", 500), ("prompt", 500), ("tree", 40), ("none", 100)]
)
def test_a_tree_is_its_branches(packing, budget: int, tmp_path: Path, no_casts: None) -> None:
    path = save_any_model(tmp_path, "mistral")
    got, num_tokens, num_rows = of_rows(path, packing, budget)
    expected, num_alone = by_themselves(path)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((got[name] - gradient).norm() / gradient.norm()) < BOUND, name
    if packing == "none":
        return
    assert num_tokens < 0.6 * num_alone or budget < 100
    assert num_rows == 1 or budget < 100


def test_a_token_of_the_environment_has_no_gradient_and_one_too_many_is_seen(
    tmp_path: Path, no_casts: None
) -> None:
    """The comparison would see a sampled token that is trained twice, or not at all."""
    path = save_any_model(tmp_path, "mistral")
    expected, _ = by_themselves(path)
    model = load(path, "auto")
    made = group(*(episode(*logged) for logged in logged_episodes()))
    trained = trained_group(token_grpo(), made, ADVANTAGES, run_settings())
    (row,) = pack_groups([trained], max_tokens_per_micro_batch=500, packing="tree")
    logprobs, _ = run_micro_batch(model, row, TEMPERATURE)
    weights = (row.loss_weights * row.advantages).to(logprobs.dtype)
    weights[0] *= 2
    (weights * logprobs).sum().backward()
    name, parameter = next(iter(model.named_parameters()))
    gradient = expected[name.removeprefix("model.")]
    assert float((parameter.grad - gradient).norm() / gradient.norm()) > 1e-3


def of_branches(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each turn the mean of its branches' returns, standardised among all: by the prompts."""
    lines: list[list[list[int]]] = []
    for logged in logged_episodes():
        before: list[list[int]] = []
        for k, each in enumerate(logged):
            known = [
                (len(e.prompt) + len(e.sampled), before[j])
                for j, e in enumerate(logged[:k])
                if each.prompt[: len(e.prompt) + len(e.sampled)] == e.prompt + e.sampled
            ]
            before.append([*max(known, default=(0, []))[1], k])
        ended = [a for a in before if not any(a == b[: len(a)] and a != b for b in before)]
        lines.append(ended)
    assert [len(own) for own in lines] == [5, 5]
    returns = [
        [sum(own[k] for k in line) for line in ended]
        for own, ended in zip(rewards, lines, strict=True)
    ]
    every = returns[0] + returns[1]
    mean, deviation = statistics.fmean(every), statistics.stdev(every) + 1e-4
    return [
        [
            statistics.fmean(
                (value - mean) / deviation
                for value, line in zip(own, ended, strict=True)
                if k in line
            )
            for k in range(7)
        ]
        for own, ended in zip(returns, lines, strict=True)
    ]


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("credit", ["turn", "branch"])
def test_it_is_with_a_recipes_weights_and_advantages_of_turns(
    packing: Packing, credit: Literal["turn", "branch"], tmp_path: Path, no_casts: None
) -> None:
    """An episode counts once, a turn has its own advantage, or its branches': formulas written out
    again."""
    path = save_any_model(tmp_path, "mistral")
    of_turns = ([0.5, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0], [0.0, 1.0, 1.0, 0.25, 0.0, 0.0, 0.0])
    outcomes = (1.0, 0.0)
    made = []
    for logged, own, outcome in zip(logged_episodes(), of_turns, outcomes, strict=True):
        completion = episode(*logged, reward=outcome)
        assert completion.episode is not None
        said = replace(completion.episode, turn_rewards=tuple(own))
        made.append(replace(completion, episode=said))
    recipe = TurnGRPO(kl_coef=0.0, credit=credit)
    trained = trained_groups(recipe, run_settings(), [group(*made)])
    model = load(path, "auto")
    for row in pack_groups(trained, max_tokens_per_micro_batch=500, packing=packing):
        logprobs, _ = run_micro_batch(model, row, TEMPERATURE)
        weights = row.loss_weights.to(logprobs.dtype) * row.advantages.to(logprobs.dtype)
        (weights * logprobs).sum().backward()
    got = {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}

    def pair(one: float, other: float) -> float:
        """``one`` standardised among the two, as GRPO does it."""
        if one == other:
            return 0.0
        return (one - (one + other) / 2) / (abs(one - other) / 2**0.5 + 1e-4)

    alone = plain(path)
    for sample, logged in enumerate(logged_episodes()):
        # rows carry weights and advantages as float32, and an outcome's advantage is one before
        weight = float(np.float32(1 / sum(len(each.sampled) for each in logged)))
        outcome = float(np.float32(pair(outcomes[sample], outcomes[1 - sample])))
        for k, each in enumerate(logged):
            of_turn = pair(of_turns[sample][k], of_turns[1 - sample][k])
            if credit == "branch":
                of_turn = of_branches(of_turns)[sample][k]
            advantage = float(np.float32(outcome + of_turn))
            ids = torch.tensor([each.prompt + each.sampled])
            logits = alone(ids).logits[0, len(each.prompt) - 1 : -1] / TEMPERATURE
            picked = logits.log_softmax(-1).gather(1, torch.tensor(each.sampled)[:, None])
            (weight * advantage * picked.sum()).backward()
    for name, parameter in alone.named_parameters():
        error = float((got[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < BOUND, name


def test_a_mask_over_what_the_environment_wrote_is_refused_and_would_be_seen(
    tmp_path: Path, no_casts: None
) -> None:
    path = save_any_model(tmp_path, "mistral")
    (logged, other) = logged_episodes()
    wrong = episode(*logged)
    wrong = replace(wrong, loss_mask=np.ones_like(wrong.loss_mask))
    assert "loss_mask" in str(completion_problem(wrong))
    mask = wrong.loss_mask.copy()
    mask[0] = False  # nothing predicts a first token
    assert wrong.episode is not None
    for turn in wrong.episode.turns:
        mask[turn.start] &= turn.parent is not None
    trained = trained_group(
        token_grpo(),
        group(replace(wrong, loss_mask=mask), episode(*other)),
        ADVANTAGES,
        run_settings(),
    )
    model = load(path, "auto")
    (row,) = pack_groups([trained], max_tokens_per_micro_batch=500, packing="tree")
    logprobs, _ = run_micro_batch(model, row, TEMPERATURE)
    ((row.loss_weights * row.advantages).to(logprobs.dtype) * logprobs).sum().backward()
    expected, _ = by_themselves(path)
    name, parameter = next(iter(model.named_parameters()))
    gradient = expected[name.removeprefix("model.")]
    assert float((parameter.grad - gradient).norm() / gradient.norm()) > 1e-3
