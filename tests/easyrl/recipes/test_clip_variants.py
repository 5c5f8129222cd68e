"""What the clips do in the fourth update of a batch, and that they do nothing in the first."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import easyrl.recipes
from easyrl.config.file import validate_config
from easyrl.recipes.loading import BUILT_IN, load_recipe, notices
from tests.easyrl.recipes.transcriptions import Packed, packed, random_batches

UPDATES, VOCAB = 4, 11
# each with the same advantages, weights and no other term, so that only the clip differs
ALIKE = {"aggregation": "token", "kl_coef": 0.0, "entropy_coef": 0.0, "dynamic_sampling": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": ALIKE,
    "dapo": {**ALIKE, "overlong_buffer": 0.0},
    "two_sided": ALIKE,
    "dual_clip": ALIKE,
    "cispo": {**ALIKE, "clip_eps_high": 1.0},
    "gspo": ALIKE,
    "gspo_token": ALIKE,
}
SAME = {("gspo", "gspo_token")}  # with one advantage for all tokens of a response


@cache
def recorded() -> tuple[Packed, Tensor, Tensor]:
    """A batch's tokens with the log-probabilities of the policy that sampled them; logits [n, V]
    and tokens [n] of a policy that is a table."""
    row = packed(easyrl.recipes, BUILT_IN["grpo"](**ALIKE), random_batches(1, num_prompts=40))
    generator = torch.Generator().manual_seed(0)
    size = len(row.logprobs)
    logits = torch.randn(size, VOCAB, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (size,), generator=generator)
    old = logprobs_of(logits, tokens)
    return replace(row, terms=replace(row.terms, old_logprobs=old)), logits, tokens


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def gradient(name: str, logits: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Of the batch's loss for the logits, and the metrics."""
    row, _, tokens = recorded()
    recipe = BUILT_IN[name](**VARIANTS[name])
    leaf = logits.clone().requires_grad_()
    logprobs = logprobs_of(leaf, tokens)
    loss = recipe.loss(logprobs, torch.zeros_like(logprobs), row.terms).sum()
    metrics = recipe.metrics(logprobs.detach(), torch.zeros_like(logprobs), row.terms)
    (found,) = torch.autograd.grad(loss, leaf)
    return found, {key: float(value) for key, value in metrics.items()}


@cache
def at_the_fourth_update() -> Tensor:
    """Logits after three updates on the same responses: a step along the gradient, and what the
    other responses' steps do to a token through weights that they share, here at random."""
    _, logits, tokens = recorded()
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES - 1):
        shared = torch.randn(len(tokens), 1, generator=generator, dtype=torch.float64)
        logits = logits - 0.3 * gradient("cispo", logits)[0]
        logits = logits.scatter_add(-1, tokens[:, None], 0.7 * shared)
    return logits


def clipped(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("clip_")}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_bound_acts_in_the_fourth_update(name: str) -> None:
    _, metrics = gradient(name, at_the_fourth_update())
    unbounded = {"clip_low_sum"} if name == "cispo" else set()  # by default
    assert all(value > 0 for key, value in clipped(metrics).items() if key not in unbounded)
    own = {"two_sided": "clip_delta_sum", "dual_clip": "clip_dual_sum"}.get(name, "clip_high_sum")
    assert own in clipped(metrics)


def test_in_the_fourth_update_no_two_clips_have_one_gradient() -> None:
    found = {name: gradient(name, at_the_fourth_update())[0] for name in VARIANTS}
    for pair in itertools.combinations(VARIANTS, 2):
        one, other = (found[name] for name in pair)
        distance = float((one - other).norm() / one.norm())
        assert (distance < 1e-12) == (pair in SAME), (pair, distance)


def test_in_the_first_update_all_have_one_gradient() -> None:
    """The ratio is 1: that of plain REINFORCE."""
    _, logits, _ = recorded()
    plain = gradient("grpo", logits)[0]
    assert plain.norm() > 0
    for name in VARIANTS:
        found, metrics = gradient(name, logits)
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-15)
        assert sum(clipped(metrics).values()) == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_says_whether_the_clip_can_act(name: str) -> None:
    values = {
        "model": {"path": "models/tiny"},
        "data": {"files": ["train.jsonl"]},
        "inference": {"endpoints": ["http://127.0.0.1:8000"]},
        "rewards": [{"name": "exact"}],
        "recipe": {"name": name},
    }
    for updates in (1, UPDATES):
        config = validate_config(values | {"trainer": {"updates_per_batch": updates}})
        said = notices(config, load_recipe(config))
        assert any("cannot act" in each for each in said) == (updates == 1)
