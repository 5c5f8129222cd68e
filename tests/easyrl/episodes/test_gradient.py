"""The gradient of an episode tree is that of its branches, each trained by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from easyrl.dataloaders.packing.groups import Packing, pack_groups
from easyrl.models.policy_model import run_micro_batch
from easyrl.recipes.groups import trained_group
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
