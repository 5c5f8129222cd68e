"""Our side: ``easyrl train`` with servers that it starts itself, and the spans of its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.parts.end_to_end.processor_time import ProcessorTime
from benchmarks.parts.end_to_end.rows import PHASE, Step
from benchmarks.parts.end_to_end.workloads import Workload
from benchmarks.parts.worktree import ROOT
from easyrl.metrics.event_log import read_events
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.machine import usable_cpus

CONFIG, REWARDS = "benchmarks/end_to_end.yaml", "benchmarks/parts/end_to_end/rewards.py"
TRAINER = ("-m", "easyrl", "train")
Cores = Literal["default", "halves"]
SPANS = {  # of a step's metrics
    "wait": "time/wait_s",
    "train": "time/train_s",
    "look ahead": "time/look_ahead_s",
    "optimizer": "time/optimizer_s",
    "sync": "time/sync_s",
}
# Phases of the trainer's thread (docs/architecture.md), of which the span "rest" is made. Those of
# the other spans are longer than these: what is beyond them is rest as well.
PHASE_METRIC = "time/phase_"
SPAN_OF_PHASE = {
    "wait": "wait",
    "train": "train",
    "look_ahead": "look ahead",
    "step": "optimizer",
    "sync": "sync",
}
IDLE, SERVER_BUSY = "time/inference_idle_s", "server busy"
TRAINED_MODEL = "model"  # in a run's folder
EVENTS_FILE, METRICS_FILE = "events-rank0.jsonl", "metrics.jsonl"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # of whoever started the benchmark


def train(
    work: Workload,
    model: Path,
    prompts: Path,
    run_dir: Path,
    num_steps: int,
    cores: Cores,
    overrides: Sequence[str] = (),
    seed: int = 0,
    checkout: Path = ROOT,
    trainer: Sequence[str] = TRAINER,
) -> list[Step]:
    """A run of ``num_steps`` in an empty folder. Raises ``RuntimeError`` if it fails.

    Args:
        cores: ``default``: what the command does by itself; ``halves``: threads for half of the
            machine each, always.
        overrides: more of the command line.
        checkout: whose code trains.
        trainer: arguments of the interpreter, before the configuration file.
    """
    settings = [
        f"run.output_dir={run_dir.absolute()}",
        f"run.seed={seed}",
        f"model.path={model.absolute()}",
        f"data.files=[{prompts.absolute()}]",
        f"data.max_prompt_tokens={work.max_prompt_tokens}",
        f"data.apply_chat_template={str(work.prompt_tokens is None).lower()}",
        f"rollout.num_generations={work.num_generations}",
        f"rollout.max_tokens={work.max_tokens}",
        f"rollout.min_tokens={work.min_tokens}",
        f"rollout.allow_off_policy_sampling={str(work.min_tokens > 0).lower()}",
        f"rewards.0.file={ROOT / REWARDS}",
        f"rewards.0.kwargs.name={work.reward}",
        f"recipe.kl_coef={work.kl_coef}",
        f"trainer.batch_size={work.batch_size}",
        f"trainer.max_steps={num_steps}",
        f"trainer.learning_rate={work.learning_rate}",
        f"trainer.max_tokens_per_micro_batch={work.max_tokens_per_micro_batch}",
    ]
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    if cores == "halves":
        num_threads = max(1, len(usable_cpus()) // 2)
        settings.append(f"inference.launch.options=[--num-threads={num_threads}]")
        environment["OMP_NUM_THREADS"] = str(num_threads)
    config = str(ROOT / CONFIG)
    command = [sys.executable, *trainer, config, *settings, *overrides]
    used = run_command(command, run_dir.with_suffix(".log"), environment, checkout)
    return read_steps(run_dir, used.between)


def run_command(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None = None
) -> ProcessorTime:
    """Waits for a command in ``folder``, default this one; what it started ends with it.

    Raises ``RuntimeError``.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True, cwd=folder
        )
        try:
            with ProcessorTime(process.pid) as used:
                status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status != 0:
        tail = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with status {status}; {log}:\n{tail}")
    return used


def read_steps(
    run_dir: Path, processor_s: Callable[[float, float], dict[str, float]] = lambda start, end: {}
) -> list[Step]:
    """The steps of a run with one update per batch, from weights that are served to the next.

    So all that a step costs is in its seconds: batch, optimizer, push, proofs, reports. Phases are
    counted from report to report: one that lies between the push and the report is of the step
    before.
    ``processor_s``: further spans between two times of the event log.
    """
    events = read_events(run_dir / EVENTS_FILE)
    ends = [event["t"] for event in events if event["event"] == "sync_end"]
    metrics = [m for m in read_metrics(run_dir / METRICS_FILE) if SPANS["train"] in m]
    assert len(ends) == len(metrics) + 1, "a push before the first step, and one behind each"
    phases = {key for line in metrics for key in line if key.startswith(PHASE_METRIC)}
    metrics = [{**dict.fromkeys(sorted(phases), 0.0), **line} for line in metrics]
    return [
        _step(end - start, line, processor_s(start, end))
        for (start, end), line in zip(pairwise(ends), metrics, strict=True)
    ]


def _step(seconds: float, metrics: Mapping[str, float], processor_s: Mapping[str, float]) -> Step:
    spans = {name: metrics[key] for name, key in SPANS.items()}
    spans["rest"] = seconds - sum(spans.values())
    for key, value in metrics.items():
        if key.startswith(PHASE_METRIC):
            name = key.removeprefix(PHASE_METRIC).removesuffix("_s")
            if name in SPAN_OF_PHASE:
                spans[f"{PHASE}{name} beyond"] = value - spans[SPAN_OF_PHASE[name]]
            else:
                spans[PHASE + name] = value
    spans[SERVER_BUSY] = seconds - metrics[IDLE]
    return Step(
        seconds=seconds,
        spans=spans | dict(processor_s),
        reward=metrics["reward/mean"],
        response_tokens=metrics["response/mean_tokens"],
    )
