"""What is made of a run's metrics and of when TensorBoard was told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from benchmarks.step_time import step_times, summary

LINES = [
    {"step": 0, "time/sync_s": 1.0, "time/phase_other_s": 1.0},
    {"step": 1, "time/phase_wait_s": 3.0, "time/phase_train_s": 0.9, "time/reward_s": 3.5},
    {"step": 1, "eval/accuracy": 0.5, "time/evaluation_s": 4.5},
    {
        "step": 2,
        "time/phase_wait_s": 1.0,
        "time/phase_train_s": 1.02,
        "time/samples_s": 0.06,
        "time/timeline_s": 0.03,
    },
]
TOLD_S = [100.0, 104.0, 105.5, 106.0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    for line, told_s in zip(LINES, TOLD_S, strict=True):
        for number, (name, value) in enumerate(line.items()):
            if name != "step":  # the first of a report counts
                writer.add_scalar(name, value, line["step"], walltime=told_s + 0.2 * (number - 1))
    writer.close()
    return tmp_path


def test_phases_are_compared_with_the_time_between_two_reports(run_dir: Path) -> None:
    one, two = step_times(run_dir)
    assert (one.step, one.wall_s, one.share) == (1, pytest.approx(4.0), pytest.approx(0.975))
    assert (two.step, two.wall_s, two.share) == (2, pytest.approx(2.0), pytest.approx(1.01))
    assert one.phases == {"wait": 3.0, "train": 0.9}
    assert one.beside == {"time/reward_s": 3.5, "time/evaluation_s": 4.5}
    assert str(one) == (
        "step 1: 4.00 s, phases 97.50% (wait 3.00, train 0.90); reward_s 3.500, evaluation_s 4.500"
    )


def test_the_last_line(run_dir: Path) -> None:
    assert summary(step_times(run_dir), {"seconds": 12.0}) == {
        "steps": 2,
        "seconds": 6.0,
        "share_min": 0.975,
        "share_median": 0.9925,
        "share_max": 1.01,
        "share_of_all": round(5.92 / 6, 4),
        "reward_s": 3.5,
        "evaluation_s": 4.5,
        "samples_share_of_steps": 0.01,
        "samples_share_of_demo": 0.005,
        "timeline_share_of_steps": 0.005,
        "timeline_share_of_demo": 0.0025,
    }
