"""Each method of the engine in several layouts, against DeepSpeed's on one process (CPU, gloo).

Launches one after another (``engine_worker.py``): random Qwen3 models of four layers, three ragged
rows and a dummy, GRPO with a KL term to another reference, two updates on a batch.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parts.layouts.cases import NUM_LAYERS, Case, write_models
from easyrl.engines.megatron.weights.mapping import rules
from easyrl.engines.perturbation import perturbation
from easyrl.runtime.machine import free_port
from tests.easyrl.engines.megatron.engine_cases import (
    FAMILIES,
    FAMILY_LAYOUTS,
    RECOMPUTED,
    SPLIT,
    save_families,
)
from tests.easyrl.engines.megatron.engine_worker import name_of
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run

pytestmark = pytest.mark.runs

HIDDEN_BYTES = 32 * 4  # of a token between stages, in fp32
CASES = [(number, case) for number, cases in SPLIT.items() for case in cases]
IN_FP32 = [(number, case) for number, case in CASES if case.dtype == "fp32"]
LIMITS = {"fp32": 1e-5, "bf16": 0.05}  # log-probabilities; norms and metrics are relative
Told = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("engine")
    write_models(made)
    save_families(made)
    launched = [(1, "alone"), (2, "split"), (4, "split"), (2, "recomputed"), (2, "families")]
    for num_processes, phase in launched:
        worker = [str(ROOT / "tests/easyrl/engines/megatron/engine_worker.py"), str(made), phase]
        launcher = [str(Path(sys.executable).with_name("deepspeed"))]
        launcher += ["--num_accelerators", str(num_processes), "--master_port", str(free_port())]
        run([sys.executable, *worker] if num_processes == 1 else [*launcher, *worker])
    return made


@cache
def load(path: Path) -> Told:
    told: Told = torch.load(path, weights_only=False)
    return told


class Layouts:
    """What the processes of one layout have told, and what was expected."""

    def __init__(self, folder: Path, num_processes: int, case: Case) -> None:
        self.case = case
        self.of_ranks = [load(folder / f"{case.name}-{rank}.pt") for rank in range(num_processes)]
        self.expected = load(folder / f"expected-{name_of(case.tied)}.pt")
        self.limit = LIMITS[case.dtype]

    @property
    def tellers(self) -> list[Told]:
        """By data-parallel rank."""
        return [told for told in self.of_ranks if told["place"].tells]

    @property
    def writer(self) -> Told:
        return self.of_ranks[0]


@pytest.fixture(params=CASES, ids=lambda each: each[1].name)
def layouts(folder: Path, request: pytest.FixtureRequest) -> Layouts:
    return Layouts(folder, *request.param)


@pytest.fixture(params=IN_FP32, ids=lambda each: each[1].name)
def exact(folder: Path, request: pytest.FixtureRequest) -> Layouts:
    return Layouts(folder, *request.param)


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys() and len(one) > 40
    return max(float((one[name].float() - two[name].float()).abs().max()) for name in one)


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


# ---- what models say -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_the_policy_says_the_same_of_each_row(layouts: Layouts, number: int) -> None:
    for told in layouts.tellers:
        said, expected = (t[f"logprobs-{number}"] for t in (told, layouts.expected))
        assert [len(each) for each in said] == [len(each) for each in expected]
        for own, theirs in zip(said, expected, strict=True):
            assert own.dtype == torch.float32 and own.device.type == "cpu"
            assert (own - theirs).abs().mean() < layouts.limit


@pytest.mark.parametrize("number", [0, 1])
def test_the_frozen_models_say_the_same_of_each_row(layouts: Layouts, number: int) -> None:
    """In a batch's first update the old policy is the policy, and says nothing."""
    assert all(told[f"has-frozen-{number}"] for told in layouts.of_ranks)
    for told in layouts.tellers:
        said, expected = (t[f"frozen-{number}"] for t in (told, layouts.expected))
        for own, theirs in zip(said, expected, strict=True):
            assert (own.reference - theirs.reference).abs().mean() < layouts.limit
            assert (own.old_policy is None) == (number == 0) == (theirs.old_policy is None)
            if number:
                assert (own.old_policy - theirs.old_policy).abs().mean() < layouts.limit
                assert (own.old_policy - own.reference).abs().mean() > 10 * layouts.limit


def same_metrics(own: Told, theirs: Told) -> None:
    for kind in ("sums", "maxima"):
        assert own[kind].keys() == theirs[kind].keys() and own[kind] is not theirs[kind]
        for name, value in theirs[kind].items():
            # differences of log-probabilities that are nearly the same are all rounding
            assert own[kind][name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


@pytest.mark.parametrize("number", [0, 1])
def test_metrics_are_those_of_each_row_in_order(exact: Layouts, number: int) -> None:
    """Without gradient of all rows; with it of those of a rank."""
    expected = exact.expected[f"evaluated-{number}"]
    assert len({each["sums"].get("loss_sum") for each in expected}) == len(expected) == 4
    for told in exact.tellers:
        place, lockstep = told["place"], told["lockstep"]
        for own, theirs in zip(told[f"evaluated-{number}"], expected, strict=True):
            same_metrics(own, theirs)
        alone_on_first = number == 0 and not lockstep
        theirs = exact.expected[f"trained-{number}"][place.data :: place.layout.data]
        if alone_on_first:
            theirs = exact.expected["trained-0"] if place.data == 0 else []
        assert len(told[f"trained-{number}"]) == len(theirs)
        for one, two in zip(told[f"trained-{number}"], theirs, strict=True):
            same_metrics(one, two)


def test_other_ranks_are_told_nothing(layouts: Layouts) -> None:
    last = layouts.case.layout.pipeline - 1
    for told in layouts.of_ranks:
        if told["place"].stage != last:
            assert told["trained-0"] == told["trained-1"] == []
            assert all(len(said) == 0 for said in told["logprobs-0"])


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_steps_are_the_same_on_all_ranks(layouts: Layouts, number: int) -> None:
    """Also where a data-parallel rank had no row (first update), and where the frozen models had
    spoken of some rows (second)."""
    expected = layouts.expected[f"step-{number}"]
    for told in layouts.of_ranks:
        step = told[f"step-{number}"]
        assert step == layouts.writer[f"step-{number}"]
        assert not step["skipped"] and step["learning_rate"] == expected["learning_rate"]
        tolerance = 1e-4 if layouts.case.dtype == "fp32" else 0.02
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)


def test_weights_after_two_steps(exact: Layouts) -> None:
    moved = apart(exact.expected["before"], exact.expected["after"])
    assert apart(exact.writer["after"], exact.expected["after"]) < 1e-5 < 0.01 * moved


def test_gradients_that_are_given_up_leave_no_trace(layouts: Layouts) -> None:
    """Discarded, infinite, or of no row at all: the weights stay, to the bit."""
    assert equal(layouts.writer["unchanged"], layouts.writer["before"])
    for told in layouts.of_ranks:
        assert told["infinite"]["skipped"] and not math.isfinite(told["infinite"]["grad_norm"])
        assert told["lockstep"] == (layouts.case.zero_stage >= 2)
        if not told["lockstep"]:
            rate = told["infinite"]["learning_rate"]
            nothing = {"grad_norm": 0.0, "learning_rate": rate, "skipped": True, "critic": None}
            assert told["nothing"] == nothing


def test_an_infinite_loss_is_told_where_it_is_made(layouts: Layouts) -> None:
    """Row 1, on the last stage; of two data-parallel ranks by the second, whose first row it is."""
    layout = layouts.case.layout
    for told in layouts.of_ranks:
        place = told["place"]
        has_row = place.data == 1 % layout.data
        if place.stage == layout.pipeline - 1 and has_row:
            assert told["raised"].startswith(f"micro-batch {1 // layout.data}: loss sum is ")
        else:
            assert told["raised"] == ""


def test_what_the_trainer_asks_before_it_calls(layouts: Layouts) -> None:
    for rank, told in enumerate(layouts.of_ranks):
        layout = layouts.case.layout
        assert told["place"] == layout.place(rank) and told["looks-ahead"]
        assert told["lockstep"] == (layouts.case.zero_stage >= 2 and layout.data > 1)


def test_recipes_that_need_what_is_not_built_are_refused(folder: Path) -> None:
    for rank in range(2):
        critic, teacher = (folder / f"refusals-{rank}.txt").read_text().splitlines()
        for said, recipe, what in ((critic, "ppo", "a critic"), (teacher, "distillation", "a tea")):
            assert said.startswith("parallel.") and f": recipe {recipe} needs {what}" in said
            assert "use trainer.zero_stage" in said


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pp2", "pp-uneven"])
def test_with_a_reference_messages_forward_are_twice_the_policys(folder: Path, name: str) -> None:
    """And those backward carry the policy's gradient alone."""
    case = next(each for each in SPLIT[2] if each.name == name)
    first, last = Layouts(folder, 2, case).of_ranks
    own = first["tokens-0"] * HIDDEN_BYTES
    assert own > 0
    assert first["sent-0"] == {"forward": 2 * own, "backward": 0}
    assert last["sent-0"] == {"forward": 0, "backward": own}


def test_models_that_have_spoken_of_a_row_are_not_run_again(folder: Path) -> None:
    """Three streams of the row that nothing is known of, one or two of the others."""
    first, last = Layouts(folder, 2, SPLIT[2][1]).of_ranks
    assert first["streams-1"] == [3, 1, 2, 1]
    streams = zip(first["tokens-1"], first["streams-1"], strict=True)
    assert first["sent-1"]["forward"] == sum(t * n for t, n in streams) * HIDDEN_BYTES
    assert last["sent-1"]["backward"] == sum(first["tokens-1"]) * HIDDEN_BYTES


# ---- weights -------------------------------------------------------------------------------------


def test_perturbed_weights_change_and_come_back(layouts: Layouts) -> None:
    """By a factor of the parameter's first tensor: all parts and copies of a tensor have one."""
    told = layouts.writer
    assert equal(told["restored"], told["after"])
    table = rules("Qwen3ForCausalLM", NUM_LAYERS, tied=layouts.case.tied)
    factors = {tensor: rule.tensors[0] for rule in table.values() for tensor in rule.tensors}
    assert factors.keys() == told["after"].keys()
    for name, weight in told["after"].items():
        expected = weight * perturbation(factors[name])
        assert told["perturbed"][name].equal(expected) and not expected.equal(weight), name


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_each_family_is_read_run_and_put_together_again(
    folder: Path, layout: str, family: str, tied: bool
) -> None:
    stored = load_file(folder / f"family-{family}/model.safetensors")
    assert ("lm_head.weight" not in stored) == tied
    of_ranks = [load(folder / f"{layout}-{family}-{rank}.pt") for rank in range(2)]
    assert equal(of_ranks[0]["weights"], stored)
    assert of_ranks[1]["weights"] == {}
    tellers = [told for told in of_ranks if told["tells"]]
    assert len(tellers) == 1
    assert (tellers[0]["logprobs"] - tellers[0]["expected"]).abs().max() < 1e-5


# ---- activation checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("case", RECOMPUTED, ids=lambda case: case.name)
def test_activation_checkpointing_saves_memory_and_changes_nothing(
    folder: Path, case: Case
) -> None:
    for rank in range(2):
        told = load(folder / f"recomputed-{case.name}-{rank}.pt")
        norm, _, weights = told["none-1"]
        for other, _, their_weights in told.values():
            assert other == norm and equal(their_weights, weights)
        peaks = {mode: peak for mode, (_, peak, _) in told.items()}
        assert peaks["layer-1"] < peaks["layer-2"] < peaks["none-1"]
        assert peaks["layer-1"] < peaks["selective-1"] < peaks["none-1"]
