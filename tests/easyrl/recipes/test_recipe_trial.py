"""A trial finds what a recipe's methods return that the trainer cannot use, with file and line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from easyrl.config import ConfigError
from easyrl.config.file import validate_config
from easyrl.dataloaders.packing.groups import pack_groups
from easyrl.recipes.loading import load_recipe, run_settings
from easyrl.recipes.trial import try_recipe
from tests.tiny_models import random_group

HEAD = """\
from dataclasses import dataclass
import numpy as np
import torch
from easyrl.recipes import GRPO

@dataclass(frozen=True)
class Mine(GRPO):
    kl_coef: float = {kl_coef}
"""
METHODS = {
    "advantages": "advantages(self, groups, run, inputs)",
    "loss": "loss(self, logprobs, entropy, terms)",
    "accepts": "accepts(self, group, run)",
    "select": "select(self, group, run)",
    "trained_tokens": "trained_tokens(self, completion, run)",
    "denominator": "denominator(self, groups, run)",
    "metrics": "metrics(self, logprobs, entropy, terms)",
}
# method, its body, what is said of it; the method is at line 9
WRONG = [
    ("advantages", "return [g.rewards * np.nan for g in groups]", "9: .* return finite numbers"),
    ("advantages", "return [['a'] * len(g.rewards) for g in groups]", "9: .* finite numbers"),
    ("advantages", "return [g.rewards[:-1] for g in groups]", "9: .* gave 3 for a group of 4"),
    ("advantages", "return None", "9: .* raised TypeError"),
    ("advantages", "return groups.rewards", "10: .* raised AttributeError"),
    ("loss", "return None", "9: .* returned NoneType .*; return a tensor of "),
    ("loss", "return (terms.advantages * logprobs).sum()", r"9: .* a tensor of shape \[\]"),
    ("loss", "return logprobs.detach()", "9: .* without gradient"),
    ("loss", "return logprobs * torch.nan", "9: .* not finite .*; return finite numbers"),
    ("loss", "return terms.reward", "10: .* raised AttributeError"),
    ("accepts", "return True", "9: .* returned True .*; return None or the reason as a text"),
    ("select", "return [99]", r"9: .* gave \[99\] for a group of 4"),
    ("trained_tokens", "return np.arange(3)", "9: .* has to be bool"),
    ("denominator", "return 0.0", "9: .* returned 0.0 .*; return a positive number"),
    ("metrics", "return {'x': logprobs.sum()}", "9: .* a name that ends in _sum, _num or _max"),
    ("metrics", "return {'x_sum': logprobs}", "9: .* return a scalar tensor"),
]


def attempt(tmp_path: Path, recipe: dict[str, object]) -> None:
    config = validate_config(tree(tmp_path, recipe))
    group = random_group(np.random.default_rng(0), 3, [2, 3, 2, 4])
    pack = partial(pack_groups, max_tokens_per_micro_batch=64)
    file = config.recipe.file or Path(__file__)
    try_recipe(load_recipe(config), file, run_settings(config), group, pack)


def tree(tmp_path: Path, recipe: dict[str, object]) -> dict[str, object]:
    return {
        "model": {"path": str(tmp_path), "dtype": "fp32"},
        "data": {"files": ["p.jsonl"]},
        "inference": {"endpoints": ["http://127.0.0.1:1"]},
        "rewards": [{"name": "exact"}],
        "rollout": {"num_generations": 4},
        "trainer": {"zero_stage": 0},
        "recipe": recipe,
    }


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "ppo", "pf_ppo"])
def test_the_built_in_recipes_pass(tmp_path, name):
    attempt(tmp_path, {"name": name})


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rloo", "RLOO"),
        ("batch_baseline", "BatchBaseline"),
        ("sequence_ratio", "SequenceRatio"),
        ("best_and_worst", "BestAndWorst"),
    ],
)
def test_the_examples_pass(tmp_path, file, name):
    attempt(tmp_path, {"name": name, "file": f"examples/recipes/{file}.py"})


@pytest.mark.parametrize("divergence", ["sampled", "full"])
@pytest.mark.parametrize("credit", ["token", "sequence"])
def test_a_users_distillation_passes(tmp_path, divergence, credit):
    file = tmp_path / "mine.py"
    file.write_text(
        "from easyrl.recipes import Distillation\n\nclass Mine(Distillation):\n    pass\n"
    )
    keys = {"teacher": str(tmp_path), "divergence": divergence, "credit": credit}
    attempt(tmp_path, {"name": "Mine", "file": str(file)} | keys)


def test_a_recipe_that_trains_nothing_of_the_group_passes(tmp_path):
    attempt(tmp_path, own(tmp_path, "select", "return []"))


@pytest.mark.parametrize(("method", "body", "message"), WRONG)
def test_what_a_method_returns_is_found(tmp_path, method, body, message):
    with pytest.raises(ConfigError, match=rf"recipe\.file: .*recipe\.py:{message}") as caught:
        attempt(tmp_path, own(tmp_path, method, body))
    assert f"Mine.{method}(" in str(caught.value)


def own(tmp_path: Path, method: str, body: str) -> dict[str, object]:
    file = tmp_path / "recipe.py"
    source = HEAD.replace("{kl_coef}", "0.0")
    file.write_text(f"{source}    def {METHODS[method]}:\n        {body}\n")
    return {"name": "Mine", "file": str(file)}
