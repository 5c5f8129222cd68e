"""Strict mode on the trainer's side: its settings, what forbids them, what is compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from easyrl.config import Config, ConfigError, ModelConfig
from easyrl.config.file import validate_config
from easyrl.kernels.attention.segment_layout import SegmentLayout
from easyrl.models.loading import load_policy_model
from easyrl.runtime.determinism import (
    ARITHMETIC_FILE,
    make_deterministic,
    remember_arithmetic,
    reproducible,
)
from easyrl.runtime.numerics import arithmetic
from tests.tiny_models import tiny_model


def config(determinism: str = "strict") -> Config:
    return validate_config(
        {
            "run": {"determinism": determinism},
            "model": {"path": "model"},
            "data": {"files": ["prompts.jsonl"]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
        }
    )


@pytest.fixture
def torch_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own settings afterwards; the environment without those of a user."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "OMP_DYNAMIC"):
        monkeypatch.setenv(name, "")  # restored afterwards, also where it was not set
        monkeypatch.delenv(name)
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.usefixtures("torch_settings")
def test_threads_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: CpuAccelerator())
    for wanted, expected in ((None, 1), ("2", 2), ("3,2", 3)):
        torch.set_num_threads(4)
        if wanted is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        make_deterministic(config())
        assert torch.get_num_threads() == expected
        assert torch.are_deterministic_algorithms_enabled()


class CpuAccelerator:
    def device_name(self) -> str:
        return "cpu"


@pytest.mark.usefixtures("torch_settings")
def test_nothing_is_changed_in_another_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    torch.set_num_threads(2)
    make_deterministic(config("none"))
    assert torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "needs CUBLAS_WORKSPACE_CONFIG=:4096:8, .* sets :0:0"),
        ("OMP_DYNAMIC", "TRUE", "the environment sets OMP_DYNAMIC=TRUE; unset it"),
        ("OMP_NUM_THREADS", "all", "OMP_NUM_THREADS is 'all', which is no number"),
        ("OMP_NUM_THREADS", "0", "OMP_NUM_THREADS is '0', which is no number"),
    ],
)
def test_what_forbids_it_is_named(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"run\.determinism: .*{said}"):
        make_deterministic(config())
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_attempt_that_computes_otherwise_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt, wanted in enumerate(("strict", "strict", "none")):
        remember_arithmetic(config(wanted), tmp_path)
        assert not caplog.records, f"attempt {attempt}"
    kept = (tmp_path / ARITHMETIC_FILE).read_text()
    assert kept == arithmetic() + "\n"
    (tmp_path / ARITHMETIC_FILE).write_text("torch 1.0, abacus\n")
    with caplog.at_level(logging.WARNING):
        remember_arithmetic(config(), tmp_path)
    assert f"with {arithmetic()}, the first one did with torch 1.0, abacus" in caplog.text
    assert (tmp_path / ARITHMETIC_FILE).read_text() == "torch 1.0, abacus\n"  # the first attempt's


def test_what_depends_on_clock_and_servers_is_not_compared() -> None:
    same = {"step": 3, "loss": 0.5, "policy/kl": 0.1, "sync/canary_mean": 1e-7, "eval/pass@2": 1.0}
    other: dict[str, Any] = {"time/step_s": 1.0, "throughput/tokens_per_s": 9.0}
    other |= {"sync/endpoints": 4.0, "batch/groups_recovered": 2.0}
    assert reproducible(same | other) == same


def test_weights_in_files_of_another_layout_give_the_same_bits(tmp_path: Path) -> None:
    """Kernels are chosen by alignment too, and mapped files have any."""
    # a product with one row is one of those that depend on it
    ids, layout = torch.tensor([5]), SegmentLayout([(0, 1, -1)])
    model = tiny_model("qwen3", tied=True, hidden_size=96, intermediate_size=160)
    results = []
    for name, size in (("one", "5GB"), ("many", "40KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        policy = load_policy_model(ModelConfig(path=tmp_path / name, dtype="fp32"))
        logprobs, _ = policy(ids, torch.tensor([0]), layout, torch.tensor([0]), ids)
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in policy.parameters())])
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert all(map(torch.equal, *results))


def test_threads_and_kernel_choices_are_part_of_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, torch_settings: None
) -> None:
    torch.set_num_threads(1)
    one = arithmetic()
    torch.set_num_threads(2)
    assert arithmetic() == one.replace("1 thread", "2 threads")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert arithmetic().endswith(", MKL_CBWR=AVX2") and torch.__version__ in one
