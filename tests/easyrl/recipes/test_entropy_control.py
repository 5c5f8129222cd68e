"""The entropy bonus that follows the measured entropy: its rule, TRL's numbers, the loop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import easyrl.recipes
from easyrl.engines.base import MetricSums, StepResult
from easyrl.recipes import DAPO, GDPO, GRPO, GSPO, DrGRPO, GSPOToken
from easyrl.recipes.entropy_control import applied_coefficient, next_entropy_controls
from easyrl.schema import Progress
from tests.easyrl.recipes.mutations import Mutation, assert_killed
from tests.easyrl.recipes.test_against_trl import CASES, assert_same, inputs, trainer
from tests.easyrl.recipes.transcriptions import packed, random_batches
from tests.easyrl.trainer.fake_parts import GOOD, FakeEngine, make_trainer
from tests.peers import peer
from tests.recipes import token_grpo


def coefficients(entropies: list[float], target: float, step: float, first: float) -> list[float]:
    """The paper's rule written down again: alpha_k = c_k where e_k is at most the target, else 0.

    That of step k acts on step k + 1.
    """
    c, applied = first, [0.0]
    for e in entropies:
        c = c + step if e <= target else c - step
        c = sorted([0.0, c, 1.0])[1]
        applied.append(c if e <= target else 0.0)
    return applied


def check_rule(recipes: ModuleType, count: int = 60) -> None:
    """``recipes``: the package, or a copy of it."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        target, step, first = rng.random(), rng.choice([0.005, 0.3]), rng.random()
        entropies = [*rng.random(12).tolist(), target]
        recipe = recipes.DAPO(entropy_target=target, entropy_coef_step=step, entropy_coef=first)
        controls: Mapping[str, float] = recipe.initial_controls()
        got = [recipe.controlled(controls).entropy_coef]
        for entropy in entropies:
            before = dict(controls)
            controls = recipe.next_controls(controls, {"entropy": entropy, "loss": 0.0})
            assert controls == recipe.next_controls(before, {"entropy": entropy})  # pure
            got.append(recipe.controlled(json.loads(json.dumps(controls))).entropy_coef)
        assert got == coefficients(entropies, target, step, first)


def test_the_rule_on_random_courses() -> None:
    check_rule(easyrl.recipes, 1000)


FILE = "entropy_control.py"
MUTATIONS = [
    Mutation(
        FILE, "(step if entropy <= target else -step)", "(-step if entropy <= target else step)"
    ),
    Mutation(FILE, "step if entropy <= target", "step if entropy < target"),
    Mutation(FILE, "min(max(moved, 0.0), maximum)", "min(moved, maximum)"),
    Mutation(FILE, "min(max(moved, 0.0), maximum)", "max(moved, 0.0)"),
    Mutation(FILE, "math.inf) <= target", "0.0) <= target"),
    Mutation(FILE, "math.inf) <= target else 0.0", "math.inf) <= target else controls[COEF]"),
    Mutation("surrogate.py", "COEF: self.entropy_coef}", "COEF: 0.0}"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    assert_killed(mutation, check_rule)


def test_what_must_not_be_confused() -> None:
    """Each part of the rule shows in a case of its own."""
    rule = {"target": 0.5, "step": 0.1, "maximum": 0.3}
    start = {"entropy_coef": 0.2}
    assert applied_coefficient(start, 0.5) == 0  # nothing measured yet
    below = next_entropy_controls(start, 0.4, **rule)
    assert below["entropy_coef"] == pytest.approx(0.3)
    assert applied_coefficient(below, 0.5) == below["entropy_coef"]
    again = next_entropy_controls(below, 0.4, **rule)
    assert again["entropy_coef"] == 0.3  # bounded
    above = next_entropy_controls(again, 0.6, **rule)
    assert above["entropy_coef"] == pytest.approx(0.2) and applied_coefficient(above, 0.5) == 0
    assert next_entropy_controls({"entropy_coef": 0.05}, 0.6, **rule)["entropy_coef"] == 0
    assert next_entropy_controls(above, math.nan, **rule) == above


def test_without_a_target_there_is_nothing_to_control() -> None:
    recipe = GRPO(entropy_coef=0.1)
    assert recipe.initial_controls() == {} and recipe.controlled({}) is recipe
    assert recipe.next_controls({}, {}) == {}
    assert not token_grpo(entropy_target=0.5).advantage_only  # a bonus may come
    assert token_grpo().advantage_only


@pytest.mark.parametrize("cls", [GRPO, DAPO, DrGRPO, GDPO])
def test_only_the_bonus_changes(cls: type[Any]) -> None:
    recipe = cls(entropy_target=0.5)
    under = recipe.controlled({"entropy_coef": 0.07, "entropy": 0.4})
    assert under == replace(recipe, entropy_coef=0.07)


@pytest.mark.parametrize("cls", [GRPO, GSPO, GSPOToken])
def test_mistakes_are_named(cls: type[Any]) -> None:
    (problem,) = cls(entropy_target=0.5, entropy_coef=-0.1).problems()
    assert problem.startswith("entropy_coef: -0.1 is where its control begins, which keeps it betw")
    assert not GRPO(entropy_coef=-0.1).problems()
    said = GRPO(entropy_coef_step=0.1, entropy_coef_max=0.5).notices()
    assert [notice.partition(":")[0] for notice in said] == [
        "entropy_coef_step",
        "entropy_coef_max",
    ]


def test_losses_and_coefficients_are_trl_s_over_several_steps() -> None:
    """Ten optimizer steps, with entropies on both sides of the target."""
    trl = peer("trl.trainer.grpo_trainer")
    settings = {"entropy_target": 0.81, "entropy_coef_step": 0.04, "entropy_coef_max": 0.1}
    recipe = DAPO(overlong_buffer=0.0, entropy_coef=0.05, **settings)
    controls: Mapping[str, float] = recipe.initial_controls()
    fake = None
    applied, theirs = [], []
    for seed in range(10):
        batches = random_batches(1, seed=seed, num_prompts=40)
        if fake is None:
            fake = trainer(batches, **CASES["dapo"][2])
            fake._entropy_bonus_enabled = fake.use_adaptive_entropy = True
            fake.entropy_coef, fake._last_world_entropy = 0.05, math.inf
            fake._entropy_window_stats = None
            fake.args.entropy_target, fake.args.entropy_coef_delta = 0.81, 0.04
            fake.args.entropy_coef_min, fake.args.entropy_coef_max = 0.0, 0.1
            fake.accelerator.sync_gradients = True
        now = trainer(batches)._get_per_token_logps_and_entropies()
        entropy = batches.entropy.flatten(0, 2)
        fake._get_per_token_logps_and_entropies = lambda *_, n=now, e=entropy, **__: (n[0], e, None)
        own = recipe.controlled(controls)
        row = packed(easyrl.recipes, own, batches)
        advantages = batches.rewards.new_zeros(batches.rewards.shape)
        advantages[row.places[:3]] = row.terms.advantages
        loss = own.loss(row.logprobs, row.entropy, row.terms).sum() / row.denominators[0]
        given = inputs(batches, advantages.flatten())
        assert_same(batches, loss, trl.GRPOTrainer._compute_loss(fake, fake.model, given))
        applied.append(own.entropy_coef)
        controls = recipe.next_controls(controls, {"entropy": float(row.entropy.detach().mean())})
        theirs.append(fake.entropy_coef)
        assert controls["entropy_coef"] == pytest.approx(fake.entropy_coef, abs=1e-12)
    assert len(set(applied)) > 2 and 0.0 in applied[1:] and len(set(theirs)) > 2


# ---- the loop ------------------------------------------------------------------------------------


class EngineOfEntropies(FakeEngine):
    """Each update has the next entropy; remembers the controls it was given."""

    def __init__(self, events: list[str], entropies: list[float], results: Any = ()) -> None:
        super().__init__(events, results)
        self.entropies = entropies
        self.given: list[dict[str, float]] = []

    def set_controls(self, controls: Mapping[str, float]) -> None:
        self.given.append(dict(controls))

    def forward_backward(self, micro_batches: Any) -> list[MetricSums]:
        (sums,) = super().forward_backward(micro_batches)
        entropy = self.entropies[len(self.given) - 1] * sums.sums["num_loss_tokens"]
        return [replace(sums, sums=sums.sums | {"entropy_sum": entropy})]


RECIPE = token_grpo(entropy_target=0.5, entropy_coef_step=0.25)
ENTROPIES = [0.25, 0.25, 0.75, 0.25]  # exact in binary, as what becomes of them


def run(entropies: list[float], progress: Progress | None = None, **options: Any) -> Any:
    events: list[str] = []
    engine = EngineOfEntropies(events, entropies, options.pop("results", ()))
    made, _ = make_trainer(events, engine=engine, progress=progress or Progress(), **options)
    functions = replace(
        made.accumulator.functions,
        initial_controls=RECIPE.initial_controls(),
        next_controls=RECIPE.next_controls,
    )
    made.accumulator = replace(made.accumulator, functions=functions)
    made.fit()
    return engine.given, made.progress


EXPECTED = [
    {"entropy_coef": 0.0},
    {"entropy_coef": 0.25, "entropy": 0.25},
    {"entropy_coef": 0.5, "entropy": 0.25},
    {"entropy_coef": 0.25, "entropy": 0.75},
    {"entropy_coef": 0.5, "entropy": 0.25},
]


def test_the_measured_entropy_of_an_update_acts_on_the_next() -> None:
    given, progress = run(ENTROPIES, num_batches=4)
    assert [*given, progress.controls] == EXPECTED


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    first, progress = run(ENTROPIES[:2], num_batches=2)
    kept = Progress(**json.loads(json.dumps(asdict(progress))))
    rest, progress = run(ENTROPIES[2:], replace(kept), num_batches=4)
    assert [*first, *rest, progress.controls] == EXPECTED


def test_another_recipe_s_controls_are_not_gone_on_with() -> None:
    given, _ = run(ENTROPIES, Progress(controls={"temperature": 2.0}), num_batches=4)
    assert given == EXPECTED[:4]


def test_updates_of_a_batch_follow_one_another() -> None:
    given, progress = run(ENTROPIES, num_batches=2, updates_per_batch=2)
    assert [*given, progress.controls] == EXPECTED


def test_a_skipped_step_changes_nothing() -> None:
    skipped = StepResult(grad_norm=math.nan, learning_rate=1e-3, skipped=True)
    given, _ = run([0.25, 0.25, 0.25], num_batches=3, results=[GOOD, skipped, GOOD])
    assert given == [EXPECTED[0], EXPECTED[1], EXPECTED[1]]


def test_a_checkpoint_without_controls_begins_anew() -> None:
    """As one that was written before the target was set."""
    kept = asdict(Progress(step=3))
    del kept["controls"]
    assert Progress(**kept).controls == {}
