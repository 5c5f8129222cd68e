"""Strict runs of each recipe come to the same weights, synchronous or not, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from benchmarks.parts.random_model import write_random_model
from easyrl.recipes.loading import BUILT_IN
from tests.end_to_end.test_ppo_run import STREAMING, WHITENED
from tests.end_to_end.test_strict_mode import UnevenProxy
from tests.golden.whole_run import Inputs, outcome, servers, train

RECIPES = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "rloo",
    "two_sided",
    "dual_clip",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
    "turn_grpo",
    "online_dpo",
    "rpo",
    "distillation",
    "distillation, full, later tokens",
    "grpo with entropy control",
    "ppo",
    "pf_ppo",
]
# by name above: the section, where it is more than the recipe's name
SECTIONS = {
    "distillation": "{name: distillation, teacher: TEACHER}",
    "distillation, full, later tokens": (
        "{name: distillation, teacher: TEACHER, divergence: full, credit: sequence}"
    ),
    "grpo with entropy control": "{name: grpo, entropy_target: 5.0, entropy_coef_step: 0.5}",
}
# the others: make test-slow
OF_EACH_SPAN_AND_SCOPE = {"cispo", "gspo", "reinforce_pp", "distillation"}
NUM_STEPS, NUM_UPDATES = 4, 2


def section_of(name: str) -> str:
    return SECTIONS.get(name, f"{{name: {name}}}")


def test_every_recipe_on_rollouts_is_run() -> None:
    """Those of ``test_ppo_run.py`` too."""
    sections = [*map(section_of, RECIPES), *(s.partition("=")[2] for s in (STREAMING, WHITENED))]
    run = {yaml.safe_load(section)["name"] for section in sections}
    assert run == {name for name, cls in BUILT_IN.items() if cls.source == "rollouts"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("strict-recipes"))


@pytest.fixture(scope="module")
def urls(inputs: Inputs) -> Iterator[tuple[list[str], list[str]]]:
    """Of one server, and of two that answer late, each response by another time."""
    with ExitStack() as opened:
        direct = [server.url for server in opened.enter_context(servers(inputs.model, 2))]
        late = []
        for seed, url in enumerate(direct):
            proxy = UnevenProxy(url, seed)
            opened.callback(proxy.close)
            late.append(proxy.url)
        yield direct[:1], late


@pytest.mark.runs
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in OF_EACH_SPAN_AND_SCOPE else pytest.mark.slow)
        for n in RECIPES
    ],
)
def test_the_final_weights_are_the_same(
    tmp_path: Path, inputs: Inputs, urls: tuple[list[str], list[str]], name: str
) -> None:
    outcomes = {}
    teacher = write_random_model(
        tmp_path / "teacher", hidden_size=64, num_layers=2, seed=1, weight_std=0.2
    )
    section = section_of(name).replace("TEACHER", str(teacher))
    for mode, own in zip(("sync", "async"), urls, strict=True):
        train(
            tmp_path / mode,
            inputs,
            own,
            f"run.mode={mode}",
            f"recipe={section}",
            f"trainer.updates_per_batch={NUM_UPDATES}",
            f"trainer.max_steps={NUM_STEPS}",
        )
        outcomes[mode] = outcome(tmp_path / mode)
    assert outcomes["sync"]["steps"] == outcomes["async"]["steps"]
    assert outcomes["sync"]["weights"] == outcomes["async"]["weights"]
    last = outcomes["sync"]["steps"][-1]
    assert last["grad_norm"] > 0
    if "policy/entropy_coef" in last:
        steps = outcomes["sync"]["steps"]
        acted = [step["policy/entropy_coef"] for step in steps if "policy/entropy_coef" in step]
        assert acted == [0.25, 1.0]  # means of two updates: 0 and 0.5, then 1 at most
    if "policy/ratio" in last:
        assert last["policy/ratio"] != 1  # the second update is on another policy's samples
