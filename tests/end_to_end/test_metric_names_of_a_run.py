"""A run that is shown with TRL's names: in TensorBoard and on the console, not in its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.parts.random_model import write_prompts
from easyrl.metrics.names import METRICS, declared
from easyrl.metrics.trackers import read_metrics
from tests.end_to_end.trainer_run import run_trainer, trainer_command

pytestmark = pytest.mark.runs

STEPS, BATCH = 2, 4
NOT_OF_SUCH_A_RUN = (  # each with what it belongs to
    *("policy/clip_delta", "policy/clip_dual", "policy/entropy_coef", "policy/teacher_kl"),
    *(
        "policy/importance_",
        "policy/accuracy",
        "policy/margin",
        "policy/chosen_",
        "policy/rejected_",
    ),
    *("policy/wanted_margin", "critic/", "balance/", "memory/device_peak_gib", "sync/broadcast"),
    *("eval/loss", "eval/pass@", "eval/avg@", "time/evaluation_wait_s"),
)


@pytest.fixture(scope="module")
def run(served: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("names")
    prompts = write_prompts(folder / "prompts.jsonl", BATCH * 4, 12)
    options = [
        *(f"trainer.batch_size={BATCH}", f"trainer.max_steps={STEPS}", "metrics.names=trl"),
        *("rollout.num_generations=4", "rollout.max_tokens=12", "run.console=true"),
        *("run.trackers=[tensorboard]", "recipe.kl_coef=0.01"),
        f"evaluation.data.files=[{prompts}]",
        *("evaluation.data.max_prompt_tokens=16", "evaluation.data.apply_chat_template=false"),
        *("evaluation.data.max_records=2", "evaluation.sampling.max_tokens=4"),
    ]
    command = trainer_command(folder / "run", served.model, prompts, [served.url], *options)
    return folder / "run", run_trainer(command)


def test_its_own_file_has_our_names_and_all_of_them(run: tuple[Path, str]) -> None:
    steps = read_metrics(run[0] / "metrics.jsonl")
    written = {name for step in steps for name in step} - {"step"}
    families = {metric.name for metric in map(declared, written) if metric and metric.is_family}
    wanted = {metric.name for metric in METRICS if not metric.is_family}
    missing = {n for n in wanted - written if not n.startswith(NOT_OF_SUCH_A_RUN)}
    assert missing == set()
    assert "reward/<reward>/mean" in families and "policy/<metric>" not in families
    assert {"memory/<phase>/host_peak_gib", "memory/<phase>/shm_peak_gib"} <= families
    last = steps[-1]
    phases = [last[f"memory/{name}/host_peak_gib"] for name in ("train", "step", "wait", "sync")]
    assert 0.01 < min(phases) <= max(phases) <= last["memory/host_peak_gib"] + 0.001  # rounded
    assert last["epoch"] == STEPS / 4 and 0.01 < last["memory/host_peak_gib"] < 100
    assert last["reward/min"] <= last["reward/mean"] <= last["reward/max"]
    assert last["throughput/generated_tokens_per_s"] == pytest.approx(
        last["tokens/response"] / last["time/last_group_s"]
    )


def test_tensorboard_and_console_have_trls(run: tuple[Path, str]) -> None:
    folder, said = run
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"} <= tags
    assert {"kl", "entropy", "clip_ratio/region_mean", "step_time", "grad_norm", "epoch"} <= tags
    assert not {"reward/mean", "response/mean_tokens", "policy/kl", "time/step_s"} & tags
    assert "time/sync_s" in tags  # TRL has none
    value = events.Scalars("completions/mean_length")[-1].value
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert value == pytest.approx(last["response/mean_tokens"], rel=1e-6)
    assert "completions/mean_length " in said and "step_time " in said
