"""Runs as users start them whose rewards stop saying anything: kept checkpoint, stop, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.alarms.rules import RULES
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.schema import NEEDS_CHANGE
from tests.end_to_end.conftest import ServedModel
from tests.end_to_end.trainer_run import (
    ROOT,
    run_to_end,
    run_trainer,
    start_ranks,
    trainer_command,
    trainer_environment,
)

BATCH, STEPS = 4, 5
# Of the first two batches' prompts the responses are told apart, of the others not.
REWARD = """
import json

def reward_func(prompt, texts, token_ids):
    known = {known}
    return [float(i) if prompt.text in known else 1.0 for i in range(len(texts))]
"""


def command(folder: Path, run: str, served: ServedModel, *options: str) -> list[str]:
    settings = [
        *("data.shuffle=false", f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}"),
        *("rollout.num_generations=2", "rollout.max_tokens=20", "alarms.warmup_batches=0"),
        *("alarms.window=1", "checkpoint.every_steps=1", "checkpoint.keep=1"),
        # a random model's figures of one batch are noise: the one that is scripted is looked at
        *("alarms.entropy_collapse=null", "alarms.entropy_rebound=null", "alarms.grad_norm=null"),
        *("alarms.length_collapse=null", "alarms.truncation=null", "alarms.repetition=null"),
        f"rewards=[{{file: {folder / 'reward.py'}, function: reward_func}}]",
        f"weight_sync.directory={folder / 'weights'}",
    ]
    prompts = folder / "prompts.jsonl"
    return trainer_command(folder / run, served.model, prompts, [served.url], *settings, *options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alarms")
    (folder / "weights").mkdir()
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * STEPS, 12)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    (folder / "reward.py").write_text(REWARD.format(known=texts[: 2 * BATCH]))
    return folder


def alarms(run: Path) -> list[tuple[str, int]]:
    events = read_events(run / "events-rank0.jsonl")
    return [(each["name"], each["step"]) for each in events if each["event"] == "alarm"]


def shown(run: Path) -> list[float]:
    metrics = read_metrics(run / "metrics.jsonl")
    return [each["alarm/no_signal"] for each in metrics if "reward/mean" in each]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_on_policy(run: Path) -> None:
    verify = [sys.executable, "-m", "easyrl", "verify", str(run)]
    result = subprocess.run(
        verify, cwd=ROOT, env=trainer_environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.runs
def test_a_checkpoint_of_the_alarm_stays_and_the_run_goes_on(
    folder: Path, served: ServedModel
) -> None:
    run = folder / "kept"
    printed = run_trainer(command(folder, "kept", served, "alarms.on_alarm=checkpoint"))
    assert alarms(run) == [("no_signal", 3)] and shown(run) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert "alarm no_signal behind step 3: 100% of the groups have equal rewards" in printed
    assert checkpoints(run) == ["step-3", "step-5"]
    assert_on_policy(run)


@pytest.mark.runs
def test_a_stop_ends_with_status_2_and_a_resume_goes_on(folder: Path, served: ServedModel) -> None:
    run = folder / "stopped"
    stopping = command(folder, "stopped", served, "alarms.on_alarm=stop")
    stopped = run_to_end(stopping)
    assert stopped.returncode == NEEDS_CHANGE, stopped.stdout[-3000:]
    assert "Traceback" not in stopped.stdout
    assert "step 3 is saved; go on with --resume" in stopped.stdout
    assert checkpoints(run) == ["step-3"] and shown(run) == [0.0, 0.0, 1.0]
    run_trainer([*stopping, "--resume"])
    assert alarms(run) == [("no_signal", 3)] and shown(run) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert_on_policy(run)


@pytest.mark.runs
def test_two_ranks_stop_together(folder: Path, served: ServedModel) -> None:
    run, log = folder / "ranks", folder / "ranks.log"
    stopping = command(folder, "ranks", served, "alarms.on_alarm=stop")
    processes = start_ranks(stopping, log, 2)
    try:
        statuses = [process.wait(200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [NEEDS_CHANGE] * 2, log.read_text()[-3000:]
    assert log.read_text().count("easyrl: alarm no_signal behind step 3") == 2
    assert checkpoints(run) == ["step-3"] and alarms(run) == [("no_signal", 3)]


@pytest.mark.slow
def test_the_demo_which_learns_raises_nothing(tmp_path: Path) -> None:
    """40 steps of a healthy run, every alarm switched on as it is by default."""
    demo = [sys.executable, "-m", "easyrl.demo", "--run-dir", str(tmp_path / "demo")]
    result = subprocess.run(
        [*demo, "trainer.max_steps=40"],
        cwd=ROOT,
        env=trainer_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = [m for m in read_metrics(tmp_path / "demo/metrics.jsonl") if "reward/mean" in m]
    assert len(metrics) == 40
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.1
    judged = {name for m in metrics for name in m if name.startswith("alarm/")}
    assert judged == {f"alarm/{rule.name}" for rule in RULES if rule.name != "kl"}
    assert all(m[name] == 0.0 for m in metrics for name in judged)
    assert alarms(tmp_path / "demo") == []
