"""The shared-prompt benchmark: its sides compute the same, and it would see it if not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.parts.shared_prompt.sizes import Shape, model_config, random_batch
from benchmarks.parts.shared_prompt.timing import (
    Disagreement,
    check,
    compare,
    matrix_product_flops,
    seconds_in_turns,
)
from benchmarks.parts.shared_prompt.workload import Forward, Workload, random_policy, workload
from benchmarks.shared_prompt import SIDES
from easyrl.models.policy_model import PolicyModel
from tests.tiny_models import tiny_config

CPU = torch.device("cpu")
VOCAB_SIZE = 67
FIELD = [  # the package each of the field's sides needs
    pytest.param(name, marks=pytest.mark.skipif(not find_spec(package), reason=f"no {package}"))
    for name, package in (
        ("prefix_grouper", "prefix_grouper"),
        ("trl", "trl"),
        ("trl_own_head", "trl"),
    )
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    folder = tmp_path_factory.mktemp("model")
    return random_policy(tiny_config("qwen3", tied=True), folder, dtype=torch.float32, device=CPU)


def small_work(policy: PolicyModel, *, ragged: bool = True, same_pass: bool = True) -> Workload:
    batch = random_batch(Shape(9, 4, 12), VOCAB_SIZE, ragged=ragged, seed=1)
    return workload(policy, batch, CPU, same_pass=same_pass)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("same_pass", [False, True])
def test_ours_padded_and_packed_compute_the_same(
    policy: PolicyModel, same_pass: bool, ragged: bool
) -> None:
    work = small_work(policy, ragged=ragged, same_pass=same_pass)
    sides = {name: SIDES[name](work) for name in ("ours", "padded", "packed")}
    errors = compare(sides, policy, "packed")
    assert set(errors) == set(sides)
    assert max(max(error) for error in errors.values()) < 1e-5


@pytest.mark.parametrize("same_pass", [False, True])
@pytest.mark.parametrize("name", FIELD)
def test_the_field_computes_the_same(policy: PolicyModel, name: str, same_pass: bool) -> None:
    work = small_work(policy, same_pass=same_pass)
    errors = compare({n: SIDES[n](work) for n in (name, "packed")}, policy, "packed")
    assert max(errors[name]) < 1e-5


def test_another_attention_or_another_loss_is_seen(policy: PolicyModel) -> None:
    work = small_work(policy)
    packed, padded = SIDES["packed"](work), SIDES["padded"](work)

    def scaled() -> Tensor:
        return 1.001 * padded()

    other = SIDES["padded"](small_work(policy, ragged=False))
    errors = compare({"packed": packed, "scaled": scaled, "other": other}, policy, "packed")
    for name in ("scaled", "other"):
        with pytest.raises(Disagreement, match=name):
            check({name: errors[name]}, torch.float32)
    check({"packed": errors["packed"]}, torch.float32)
    with pytest.raises(Disagreement, match="broken"):
        check({"broken": (float("nan"), 0.0)}, torch.float32)


def test_a_side_without_memory_is_left_out(policy: PolicyModel) -> None:
    work = small_work(policy)

    def too_large() -> Tensor:
        raise torch.OutOfMemoryError

    sides: dict[str, Forward] = {"packed": SIDES["packed"](work), "large": too_large}
    assert set(compare(sides, policy, "packed")) == {"packed"}
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_sides_take_turns(policy: PolicyModel) -> None:
    called: list[str] = []

    def side(name: str) -> Forward:
        def forward() -> Tensor:
            called.append(name)
            return next(policy.parameters()).sum()

        return forward

    seconds = seconds_in_turns({"a": side("a"), "b": side("b")}, policy, CPU, 3)
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert matrix_product_flops(CPU, torch.float32, repeats=1) > 0


def test_batches_have_the_shape_asked_for() -> None:
    shape = Shape.parse("20,5,30")
    assert [len(r) for r in random_batch(shape, VOCAB_SIZE).responses] == [30] * 5
    lengths = [len(r) for r in random_batch(shape, VOCAB_SIZE, ragged=True).responses]
    assert max(lengths) == 30 and min(lengths) >= 15 and len(set(lengths)) > 1
    for wrong in ("20,5", "0,5,30"):
        with pytest.raises(ValueError):
            Shape.parse(wrong)
    assert model_config("0.6b").num_hidden_layers == 28


@pytest.mark.slow
def test_a_small_run() -> None:
    command = [sys.executable, "-m", "benchmarks.shared_prompt", "--shapes", "32,2,8", "16,3,8"]
    ended = subprocess.run(
        [*command, "--repeats", "1", "--without", "trl,prefix_grouper"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert [(row["P"], row["G"], row["R"]) for row in rows] == [(32, 2, 8), (16, 3, 8)]
    for row in rows:
        assert row["vs_padded"] > 0 and row["vs_packed"] > 0 and row["vs_trl"] is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.shared_prompt.find_spec", lambda _: None)
    from benchmarks.shared_prompt import _sides

    with pytest.raises(SystemExit, match=r"prefix_grouper,trl.*\[bench\].*--without"):
        _sides([])
    assert set(_sides(["trl", "prefix_grouper"])) == {"ours", "padded", "packed"}
