"""Checkpoints of a split model in other layouts and in DeepSpeed's engine, and back (CPU, gloo).

Three launches one after another (``state_worker.py``): 2 tensor ranks x 2 stages write; four other
layouts on four processes, then one process, then the first layout again go on. Random Qwen3 models
with tied and untied embeddings, fp32 and bf16.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parts.layouts.cases import Case, write_models
from easyrl.runtime.machine import free_port
from tests.easyrl.engines.megatron.state_cases import (
    ADAM,
    MODELS,
    alone,
    back,
    others,
    saved_name,
    written,
)
from tests.easyrl.engines.megatron.state_worker import read_saved
from tests.easyrl.engines.test_deepspeed_engine import ROOT, run

pytestmark = pytest.mark.slow

BETAS = (0.9, 0.999)
State = dict[str, Tensor]  # whole flat tensors, by key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    write_models(made)
    for phase, num_processes in (("split", 4), ("alone", 1), ("back", 4)):
        worker = [str(ROOT / "tests/easyrl/engines/megatron/state_worker.py"), str(made), phase]
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "4"]
        launcher += ["--master_port", str(free_port())]
        run([sys.executable, *worker] if num_processes == 1 else [*launcher, *worker])
    return made


@pytest.fixture(params=MODELS, ids=lambda m: f"{'tied' if m[0] else 'untied'}-{m[1]}")
def model(request: pytest.FixtureRequest) -> tuple[bool, str]:
    return request.param


def readers(model: tuple[bool, str]) -> list[Case]:
    return [*others(*model), alone(*model), back(*model)]


def state(folder: Path, name: str) -> State:
    with closing(read_saved(folder / name)) as saved:
        return {key: saved.read(key, 0, saved.numel(key)) for key in sorted(saved.keys())}


def weights(folder: Path, name: str) -> State:
    return load_file(folder / name / "weights.safetensors")


def differing(one: State, two: State) -> list[str]:
    assert one.keys() == two.keys() and len(one) > 40
    return [name for name in one if not one[name].equal(two[name])]


def test_all_layouts_have_the_same_state_and_weights(folder: Path, model: tuple[bool, str]) -> None:
    """Masters, both moments and step counts, saved again by each; and what endpoints would get."""
    first = saved_name(written(*model), 1)
    for case in readers(model):
        name = saved_name(case, 1)
        assert differing(state(folder, first), state(folder, name)) == [], name
        assert differing(weights(folder, first), weights(folder, name)) == [], name


def test_the_state_is_that_of_the_step(folder: Path, model: tuple[bool, str]) -> None:
    """Masters are the weights, and AdamW's first step from the initial ones with these moments."""
    case = written(*model)
    initial, after = weights(folder, saved_name(case, 0)), weights(folder, saved_name(case, 1))
    saved = state(folder, saved_name(case, 1))
    rate = read_saved(folder / saved_name(case, 1)).description["rate"]
    assert rate == pytest.approx(ADAM["learning_rate"] / 3)
    for name, weight in after.items():
        master, mean, square, count = (
            saved[f"{kind}/{name}"] for kind in ("master", "exp_avg", "exp_avg_sq", "step")
        )
        assert master.to(weight.dtype).equal(weight.flatten()) and count.tolist() == [1.0]
        assert mean.abs().max() > 0
        update = mean / (1 - BETAS[0]) / ((square / (1 - BETAS[1])).sqrt() + ADAM["adam_eps"])
        decay = ADAM["weight_decay"] if weight.ndim > 1 else 0.0
        expected = initial[name].flatten().float() * (1 - rate * decay) - rate * update
        assert (master - expected).abs().max() < 1e-6, name


def test_the_next_step_is_that_of_the_layout_that_wrote_it(
    folder: Path, model: tuple[bool, str]
) -> None:
    """In the same layout to the bit; else within rounding, which in bf16 moves single elements by a
    tenth of a step of 6e-4."""
    straight = state(folder, saved_name(written(*model), 2))
    limit = 1e-6 if model[1] == "fp32" else 1.5e-4
    for case in readers(model):
        went_on = state(folder, saved_name(case, 2))
        if case.name == "back":
            assert differing(straight, went_on) == []
        apart = {n: float((straight[n] - went_on[n]).abs().max()) for n in straight}
        masters = {n: value for n, value in apart.items() if n.startswith("master/")}
        assert max(masters.values()) < limit, (case, max(masters, key=masters.__getitem__))
        assert went_on["step/model.norm.weight"].tolist() == [2.0]


def test_nothing_is_saved_twice(folder: Path, model: tuple[bool, str]) -> None:
    for case in (written(*model), *readers(model)):
        name, num_elements = saved_name(case, 1), 0
        for file in (folder / name).glob("rank-*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                shapes = [opened.get_slice(k).get_shape() for k in opened.keys()]  # noqa: SIM118
                num_elements += sum(map(math.prod, shapes))
        sizes = [weight.numel() for weight in weights(folder, name).values()]
        assert num_elements == 3 * sum(sizes) + len(sizes), name


def test_before_the_first_step_there_are_no_moments(folder: Path) -> None:
    """What is restored then makes the first step again, to the bit."""
    case = written(True, "fp32")
    initial = state(folder, saved_name(case, 0))
    assert {key.partition("/")[0] for key in initial} == {"master"}
    assert differing(state(folder, "begun-again"), state(folder, saved_name(case, 1))) == []


def test_what_does_not_fit_is_refused_by_all(folder: Path) -> None:
    for rank in range(4):
        untied, bf16 = json.loads((folder / f"refusals-{rank}.json").read_text())
        assert untied.startswith("the checkpoint does not fit: number of parameters is ")
        assert "model.dtype is fp32, now bf16; resume with the settings" in bf16


def test_whole_tensors_are_compared_element_by_element() -> None:
    """The comparison of this file sees one wrong bit."""
    one = {str(n): torch.zeros(3) for n in range(50)}
    other = one | {"7": torch.tensor([0.0, 1e-45, 0.0])}
    assert differing(one, dict(one)) == [] and differing(one, other) == ["7"]
