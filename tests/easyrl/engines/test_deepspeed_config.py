"""The learning-rate schedule, refusals and the probe's factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from easyrl.config import Config, ConfigError, TrainerConfig
from easyrl.config.file import validate_config
from easyrl.engines.deepspeed.config import schedule_factor, training_config
from easyrl.engines.deepspeed.late_denominator import require_late_scalar
from easyrl.engines.perturbation import perturbation


def factors(num_steps: int, **trainer: object) -> list[float]:
    factor = schedule_factor(TrainerConfig(**trainer), num_steps)
    return [factor(step) for step in range(num_steps)]


def test_warm_up_then_constant() -> None:
    assert factors(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_falls_towards_the_lowest_rate() -> None:
    got = factors(6, lr_schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert got == pytest.approx([1.0, 1.0, 0.84, 0.68, 0.52, 0.36])


def test_cosine_is_half_way_in_the_middle() -> None:
    got = factors(4, lr_schedule="cosine", min_lr_ratio=0.1)
    assert got[0] == 1.0 and got[2] == pytest.approx(0.55)
    assert got == sorted(got, reverse=True)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_is_that_of_transformers(name: str) -> None:
    num_steps, warmup = 10, 3
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, warmup, num_steps).lr_lambdas[0]
    ours = factors(num_steps, lr_schedule=name, warmup_steps=warmup)
    # the warm-up differs: theirs takes its first step at rate 0
    assert ours[warmup:] == pytest.approx([theirs(step) for step in range(warmup, num_steps)])
    assert ours[-1] > 0


def test_schedule_stays_at_the_end_where_a_run_goes_on() -> None:
    factor = schedule_factor(TrainerConfig(lr_schedule="linear", min_lr_ratio=0.3), 4)
    assert factor(100) == pytest.approx(0.3)


def test_decaying_schedule_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="trainer.lr_schedule: cosine needs an end.*max_steps"):
        schedule_factor(TrainerConfig(lr_schedule="cosine"), None)


def config(tmp_path: Path, dtype: str = "fp32", **trainer: object) -> Config:
    return validate_config(
        {
            "model": {"path": str(tmp_path), "dtype": dtype},
            "data": {"files": [str(tmp_path / "prompts.jsonl")]},
            "inference": {"endpoints": ["http://127.0.0.1:1"]},
            "rewards": [{"name": "exact"}],
            "trainer": trainer,
        }
    )


def test_offload_without_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.offload_optimizer: needs trainer.zero_stage"):
        config(tmp_path, zero_stage=0, offload_optimizer=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_accumulates_and_communicates_in_fp32(tmp_path: Path, stage: int) -> None:
    settings = training_config(config(tmp_path, dtype="bf16", zero_stage=stage))
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["communication_data_type"] == "fp32"
    assert settings["managed_gradient_accumulation"] is False


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduction_buffers_are_bounded(tmp_path: Path, stage: int) -> None:
    """DeepSpeed's default bucket of half a billion elements is 2 GB in fp32, held by ZeRO-3."""
    for dtype in ("bf16", "fp32"):
        settings = training_config(config(tmp_path, dtype=dtype, zero_stage=stage))
        assert settings["zero_optimization"]["reduce_bucket_size"] * 4 <= 256 * 2**20


def test_bf16_gradients_do_not_wait_for_the_step(tmp_path: Path) -> None:
    settings = training_config(config(tmp_path, dtype="bf16", zero_stage=1))
    assert settings["bf16"]["immediate_grad_update"] is True


def test_default_shares_gradients_between_ranks(tmp_path: Path) -> None:
    assert config(tmp_path).trainer.zero_stage == 2


def test_optimizer_that_ignores_the_late_scalar_is_refused() -> None:
    """As DeepSpeed's fp16 optimizer would, or a wrapper that another version brings."""
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="trainer.zero_stage: DeepSpeed steps with AdamW"):
        require_late_scalar(plain)


def test_perturbation_is_never_small_and_has_both_signs() -> None:
    changes = [perturbation(f"model.layers.{i}.weight") - 1 for i in range(200)]
    assert all(0.3 * 0.05 <= abs(change) <= 0.05 for change in changes)
    assert 60 < sum(change > 0 for change in changes) < 140
    assert len(set(changes)) == 200
