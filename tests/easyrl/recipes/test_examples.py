"""The recipes of ``examples/recipes`` against dense formulas, and each as a run of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.parts.random_model import write_prompts, write_random_model
from easyrl.config import ModelConfig
from easyrl.config.file import validate_config
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.metrics.trackers import read_metrics
from easyrl.models.loading import load_policy_model
from easyrl.models.tri_model import TriModel, frozen_model
from easyrl.recipes import Recipe
from easyrl.recipes.groups import trained_groups
from easyrl.recipes.loading import load_recipe, notices
from easyrl.schema import RolloutGroup
from tests.easyrl.engines.engine_cases import (
    TEMPERATURE,
    dense_logprobs,
    make_groups,
    prepare,
    relative_error,
)
from tests.easyrl.weight_sync.weight_sync_parts import serve
from tests.end_to_end.trainer_run import ROOT, run_trainer, trainer_command
from tests.golden.whole_run import Inputs, servers
from tests.recipes import run_settings

FOLDER = ROOT / "examples" / "recipes"
NAMES = {
    "rloo": "RLOO",
    "batch_baseline": "BatchBaseline",
    "sequence_ratio": "SequenceRatio",
    "best_and_worst": "BestAndWorst",
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    prepare(folder)
    return folder


def example(name: str, **settings: object) -> Recipe:
    config = {
        "model": {"path": "models/tiny"},
        "data": {"files": ["train.jsonl"]},
        "inference": {"endpoints": ["http://127.0.0.1:8000"]},
        "rewards": [{"name": "exact"}],
        "recipe": {"file": str(FOLDER / f"{name}.py"), "name": NAMES[name]} | settings,
        "trainer": {"updates_per_batch": 2},
    }
    return load_recipe(validate_config(config))


def packed_gradients(
    folder: Path, recipe: Recipe, groups: list[RolloutGroup], *, max_tokens: int
) -> dict[str, Tensor]:
    """Through packing and the recipe's loss, row by row, fp64."""
    policy, old = (
        load_policy_model(ModelConfig(path=folder / name), dtype=torch.float64)
        for name in ("policy", "old")
    )
    frozen = frozen_model(old) if recipe.needs.old_policy else None
    tri = TriModel(policy, reference=None, old_policy=frozen, temperature=TEMPERATURE, device=CPU)
    run = run_settings(num_generations=3)
    trained = trained_groups(recipe, run, groups, [group.rewards for group in groups])
    rows = pack_groups(trained, max_tokens_per_micro_batch=max_tokens, keep_order=False)
    for row in rows:
        tri.loss(row, recipe, same_pass=recipe.span == "token")[0].backward()
    denominator = recipe.denominator(groups, run)
    parameters = policy.named_parameters()
    return {n.removeprefix("model."): p.grad / denominator for n, p in parameters}


Tokens = list[list[tuple[Tensor, Tensor, Tensor]]]  # policy, old, mask of each response


def dense_gradients(
    folder: Path, groups: list[RolloutGroup], loss_of: Callable[[Tokens], Tensor]
) -> dict[str, Tensor]:
    """Each sequence on its own through plain Hugging Face models."""
    policy, old = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", "old")
    )
    tokens = []
    for group in groups:
        tokens.append([])
        for c in group.completions:
            logp, _ = dense_logprobs(policy, group.prompt.token_ids, c.token_ids)
            with torch.no_grad():
                old_logp, _ = dense_logprobs(old, group.prompt.token_ids, c.token_ids)
            tokens[-1].append((logp, old_logp, torch.from_numpy(c.loss_mask)))
    loss_of(tokens).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def rloo(groups: list[RolloutGroup]) -> Callable[[Tokens], Tensor]:
    def loss(tokens: Tokens) -> Tensor:
        terms = []
        for group, responses in zip(groups, tokens, strict=True):
            for i, (logp, _, mask) in enumerate(responses):
                others = [r for j, r in enumerate(group.rewards.tolist()) if j != i]
                terms.append(-(group.rewards[i] - np.mean(others)) * (logp * mask).sum())
        return torch.stack(terms).mean()

    return loss


def batch_baseline(groups: list[RolloutGroup]) -> Callable[[Tokens], Tensor]:
    def loss(tokens: Tokens) -> Tensor:
        rewards = [r for group in groups for r in group.rewards.tolist()]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for group, responses in zip(groups, tokens, strict=True):
            for reward, (logp, _, mask) in zip(group.rewards.tolist(), responses, strict=True):
                advantage = (reward - np.mean(rewards)) / np.std(rewards)
                total = total - advantage * (logp * mask).sum()
                count += int(mask.sum())
        return total / count

    return loss


def sequence_ratio(groups: list[RolloutGroup]) -> Callable[[Tokens], Tensor]:
    def loss(tokens: Tokens) -> Tensor:
        terms, clipped = [], 0
        for group, responses in zip(groups, tokens, strict=True):
            rewards = group.rewards.astype(np.float64)
            for reward, (logp, old, mask) in zip(rewards, responses, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                ratio = ((logp - old) * mask).sum().div(mask.sum()).exp()
                bound = ratio.clamp(0.95, 1.02)
                terms.append(-torch.min(ratio * advantage, bound * advantage))
                clipped += bool(bound * advantage < ratio * advantage)
        assert 0 < clipped < len(terms)  # the comparison is about clipping too
        return torch.stack(terms).mean()

    return loss


def best_and_worst(groups: list[RolloutGroup]) -> Callable[[Tokens], Tensor]:
    def loss(tokens: Tokens) -> Tensor:
        terms = []
        for group, responses in zip(groups, tokens, strict=True):
            rewards = group.rewards.astype(np.float64)
            for i in (int(rewards.argmin()), int(rewards.argmax())):
                logp, old, mask = responses[i]
                advantage = (rewards[i] - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                ratio = (logp - old).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                terms.append(-(surrogate * mask).sum() / mask.sum())
        return torch.stack(terms).mean()

    return loss


CASES = {
    "rloo": (rloo, {}),
    "batch_baseline": (batch_baseline, {}),
    "sequence_ratio": (sequence_ratio, {"clip_low": 0.05, "clip_high": 0.02}),
    "best_and_worst": (best_and_worst, {"kl_coef": 0.0}),
}


@pytest.mark.parametrize("max_tokens", [20, 60])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_its_formula(folder: Path, name: str, max_tokens: int) -> None:
    formula, settings = CASES[name]
    groups = [
        replace(g, completions=tuple(c for c in g.completions if c.loss_mask.any()))
        for g in make_groups()
    ]
    groups = [replace(g, scores=g.scores[: len(g.completions)]) for g in groups]
    groups = [g for g in groups if len(g.completions) > 1]
    recipe = example(name, **settings)
    got = packed_gradients(folder, recipe, groups, max_tokens=max_tokens)
    expected = dense_gradients(folder, groups, formula(groups))
    # the norms of the models round to fp32, differently in each packing
    assert relative_error(got, expected) < 1e-5


def test_rloo_is_at_most_30_lines() -> None:
    assert len((FOLDER / "rloo.py").read_text().splitlines()) <= 30


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_knows_no_engine_file_or_endpoint(name: str) -> None:
    imported = re.findall(r"^(?:from|import) (\S+)", (FOLDER / f"{name}.py").read_text(), re.M)
    assert set(imported) <= {"dataclasses", "typing", "numpy", "torch", "easyrl.recipes"}


@pytest.mark.runs
@pytest.mark.parametrize("name", NAMES)
def test_runs_by_one_command(tmp_path: Path, name: str) -> None:
    """Two batches of the real thing; a batch's statistics say that they do not stream."""
    file = FOLDER / f"{name}.py"
    assert NAMES[name] in (file.read_text().split('"""')[1])  # the command in its docstring
    model = write_random_model(tmp_path / "model", hidden_size=32, num_layers=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 12)
    with serve(model) as url:
        command = trainer_command(
            tmp_path / "run",
            model,
            prompts,
            [url],
            f"recipe={{file: {file}, name: {NAMES[name]}}}",
            *("rollout.num_generations=4", "rollout.max_tokens=12", "trainer.batch_size=4"),
            *("trainer.updates_per_batch=2", "trainer.learning_rate=1e-3"),
        )
        run_trainer(command, timeout_s=120)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps if "grad_norm" in step] == [2, 4]
    assert all(step["grad_norm"] > 0 for step in steps if "grad_norm" in step)


@pytest.mark.runs
def test_a_batch_wide_statistic_is_that_of_all_ranks(tmp_path: Path) -> None:
    """The same responses on one rank and on two: the same gradient, and it is said."""
    inputs = Inputs(tmp_path)
    norms = []
    with servers(inputs.model, 1) as (server,):
        for num_ranks in (0, 2):
            command = trainer_command(
                tmp_path / f"ranks-{num_ranks}",
                inputs.model,
                inputs.prompts,
                [server.url],
                f"recipe={{file: {FOLDER / 'batch_baseline.py'}, name: BatchBaseline}}",
                *("run.determinism=strict", "rollout.num_generations=4", "rollout.max_tokens=12"),
                *("trainer.batch_size=4", "trainer.max_steps=1"),
                num_ranks=num_ranks,
            )
            output = run_trainer(command, timeout_s=180)
            (step,) = [
                step
                for step in read_metrics(tmp_path / f"ranks-{num_ranks}" / "metrics.jsonl")
                if "grad_norm" in step
            ]
            norms.append(step["grad_norm"])
            assert "the run does not stream" in str(output)
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_batch_wide_statistic_is_said_not_to_stream() -> None:
    config = validate_config(
        {
            "model": {"path": "models/tiny"},
            "data": {"files": ["train.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:8000"]},
            "rewards": [{"name": "exact"}],
            "recipe": {"file": str(FOLDER / "batch_baseline.py"), "name": "BatchBaseline"},
        }
    )
    (said,) = notices(config, load_recipe(config))
    assert said.startswith("the run does not stream: the advantages of recipe BatchBaseline are of")
