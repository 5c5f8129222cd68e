"""Copies of weights on the host: the same bytes, and the next module under way meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

from easyrl.config import ModelConfig  # noqa: E402
from easyrl.engines.host_copies import HostCopy, one_ahead  # noqa: E402
from easyrl.engines.weight_names import saved_weights  # noqa: E402
from easyrl.models.loading import load_policy_model  # noqa: E402
from tests.tiny_models import save_tiny_model  # noqa: E402


def test_a_copy_on_a_cpu_is_a_copy() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    copy = HostCopy({"weight": weight})
    values = copy.ready()["weight"]
    assert not copy.runs_behind and not values.requires_grad
    before = values.clone()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(values, before)


def test_what_is_kept_is_not_copied_on_a_cpu() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    values = HostCopy({"weight": weight}, kept=True).ready()["weight"]
    assert values.data_ptr() == weight.data_ptr() and not values.requires_grad


def test_a_model_that_is_not_sharded_hands_out_its_own_memory(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", tied=True)
    model = load_policy_model(ModelConfig(path=tmp_path, dtype="bf16")).model
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {t.data_ptr() for _, t in saved_weights(model, is_writer=True)} <= own


def test_without_data_nothing_is_copied() -> None:
    copy = HostCopy({"weight": torch.empty(2, 3, device="meta")})
    assert not copy.runs_behind and copy.ready()["weight"].is_meta


class Scripted:
    def __init__(self, number: int, runs_behind: bool, log: list[str]) -> None:
        self.number, self.runs_behind, self.log = number, runs_behind, log
        log.append(f"start {number}")

    def ready(self) -> dict[str, Tensor]:
        self.log.append(f"ready {self.number}")
        return {}


@pytest.mark.parametrize(
    ("runs_behind", "order"),
    [
        (True, "start 0, start 1, ready 0, use, start 2, ready 1, use, ready 2, use"),
        (False, "start 0, ready 0, use, start 1, ready 1, use, start 2, ready 2, use"),
    ],
)
def test_the_next_copy_runs_while_one_is_used(runs_behind: bool, order: str) -> None:
    log: list[str] = []

    def copies() -> Iterator[HostCopy]:
        for number in range(3):
            yield cast(HostCopy, Scripted(number, runs_behind, log))

    for _ in one_ahead(copies()):
        log.append("use")
    assert ", ".join(log) == order


def test_of_nothing_there_is_nothing() -> None:
    assert list(one_ahead([])) == []


@pytest.mark.gpu
class TestOnGpu:
    def test_weights_arrive_in_page_locked_memory(self, tmp_path: Path) -> None:
        save_tiny_model(tmp_path, "qwen3", tied=True)
        model = load_policy_model(ModelConfig(path=tmp_path, dtype="bf16"))
        expected = {n: t.clone() for n, t in saved_weights(model.model, is_writer=True)}
        model.to("cuda")
        got: dict[str, Any] = {}
        for name, tensor in saved_weights(model.model, is_writer=True):
            assert tensor.is_pinned(), name
            got[name] = tensor.clone()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
