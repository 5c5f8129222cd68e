"""The comparison of two checkouts: what it reads, what it sees, what both are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.parts.same_as_before.reward import reward_func
from benchmarks.parts.same_as_before.settings import (
    QUICK,
    SETTINGS,
    Inputs,
    Setting,
    base_form,
    form_of,
    present_form,
    select,
)
from benchmarks.parts.same_as_before.side import Failed, flat_batches
from benchmarks.parts.same_as_before.tensors import (
    compare,
    digest,
    read_states,
    relative_difference,
    unchanged,
)
from benchmarks.parts.worktree import ROOT
from easyrl.config.file import validate_config


def states() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(5, generator=numbers) for name in ("master/w", "exp_avg/w")}
        for _ in range(3)
    ]


# ---- comparing -----------------------------------------------------------------------------------


def test_equal_runs_are_equal() -> None:
    difference = compare(states(), states())
    assert difference.equal and difference.max_rel_diff == 0
    assert difference.equal_batches == [True] * 3


def test_one_ulp_of_one_element_of_one_batch_is_seen() -> None:
    now = states()
    moment = now[1]["exp_avg/w"]
    moment[3] = torch.nextafter(moment[3], torch.tensor(9.0))
    difference = compare(states(), now)
    assert difference.equal_batches == [True, False, True] and not difference.equal
    assert 0 < difference.max_rel_diff < 2.0**-23


def test_the_sign_of_zero_and_the_type_are_seen() -> None:
    zero = torch.zeros(3)
    assert digest(zero) != digest(-zero)
    assert digest(zero) != digest(zero.to(torch.int32))
    assert digest(zero) == digest(zero.clone())
    assert not compare([{"w": zero}], [{"w": -zero}]).equal


def test_the_difference_is_relative_to_the_largest_element() -> None:
    a, b = torch.tensor([0.0, -4.0, 1.0]), torch.tensor([0.5, -4.0, 0.0])
    assert relative_difference("w", a, b) == 0.25
    assert relative_difference("w", torch.zeros(2), torch.zeros(2)) == 0


def test_other_tensors_are_refused() -> None:
    for wrong in ({"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.full((2,), torch.nan)}):
        with pytest.raises(ValueError, match="w"):
            compare([{"w": torch.ones(2)}], [wrong])


def test_what_was_not_trained_is_named() -> None:
    run = states()
    assert unchanged(run) == []
    run[2]["master/w"] = run[0]["master/w"]
    assert unchanged(run) == ["master/w"]


# ---- reading -------------------------------------------------------------------------------------


def write(file: Path, starts: dict[str, int] | None, **tensors: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    places = {name: {"saved_offsets": [start]} for name, start in (starts or {}).items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(places)} if places else None
    save_file(tensors, file, metadata=metadata)


def test_files_may_be_called_and_cut_otherwise(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    first, last = whole[:2].clone(), whole[2:].clone()
    write(tmp_path / "a" / "step-1" / "rank-0.safetensors", {"w": 0}, w=whole)
    # the pieces' places decide, not the files' names
    write(tmp_path / "b" / "after-1" / "x.safetensors", {"w": 2}, w=last)
    write(tmp_path / "b" / "after-1" / "y.safetensors", {"w": 0}, w=first)
    write(tmp_path / "c" / "1" / "0.safetensors", None, w=first, v=last)
    write(tmp_path / "c" / "1" / "1.safetensors", None, w=last)
    a, b, c = (read_states(tmp_path / name) for name in "abc")
    assert compare(a, b).equal
    assert c[0]["w"].equal(whole) and c[0]["v"].equal(last)


def test_checkpoints_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        write(tmp_path / f"step-{step}" / "w.safetensors", None, w=torch.full((1,), float(step)))
    write(tmp_path / "model" / "model.safetensors", None, w=torch.zeros(1))  # an export
    assert [float(state["w"]) for state in read_states(tmp_path)] == [1, 2, 10]


def test_groups_of_equal_rewards_are_counted(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(s) + "\n" for s in ({"step": 0}, {"loss": 1.0})))
    with pytest.raises(Failed, match="flat_groups"):
        flat_batches(metrics)
    steps = [{"step": 0}, *({"reward/flat_groups": share} for share in (0.0, 0.25, 0.0))]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert flat_batches(metrics) == 1


# ---- settings ------------------------------------------------------------------------------------


def test_eight_settings_and_how_to_choose_among_them() -> None:
    assert len(SETTINGS) == len({str(s) for s in SETTINGS} | {s.folder for s in SETTINGS}) // 2 == 8
    assert str(SETTINGS[0]) == "ranks=1 updates=1 zero=0" and {*QUICK} < {*SETTINGS}
    assert select(["ranks=2", "zero=0"]) == [Setting(2, 1, 0), Setting(2, 2, 0)]
    assert select(["ranks=3"]) == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_present_tree_reads_its_form(setting: Setting, tmp_path: Path) -> None:
    (rewards := tmp_path / "rewards.py").write_text("")
    inputs = Inputs(tmp_path, tmp_path / "prompts.jsonl", rewards, "http://127.0.0.1:1")
    config = validate_config(present_form(setting, inputs, tmp_path / "run"))
    assert config.trainer.updates_per_batch == setting.updates
    assert config.trainer.zero_stage == setting.zero


def test_the_base_keeps_its_form(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path, tmp_path, tmp_path, "")
    form = base_form(SETTINGS[0], inputs, tmp_path)
    assert form["objective"]["kl_coef"] > 0  # a reference model is there
    assert form["run"]["determinism"] == "strict"


def test_a_checkout_is_told_its_own_form(tmp_path: Path) -> None:
    assert form_of(tmp_path) is base_form  # as commit e7cfbd6
    (tmp_path / "easyrl" / "recipes").mkdir(parents=True)
    assert form_of(tmp_path) is present_form
    assert form_of(ROOT) is present_form


def test_rewards_differ_and_are_the_same_each_time() -> None:
    responses = [[1, 2, 3], [1, 2], [3, 2, 1], []]
    rewards = reward_func("", [""] * 4, responses)
    assert rewards == reward_func("", [""] * 4, responses)
    assert len({*rewards}) == 4 and all(0 <= reward <= 1 for reward in rewards)
