"""How much of the ideal overlap periodic asynchrony reaches: one run, sync and async, in one go.

``python -m benchmarks.overlap [--repeats 3] [--batches 3]``

Real generation by an embedded server on one core and real training by the trainer on another, of
about equal length. The bound is what no schedule can beat within one batch: the longer of
generation and training, plus weight sync and optimizer step, summed over batches from the sync
run's own spans.
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_model import write_prompts, write_random_model
from easyrl.inference_client.servers.managed.launch import EmbeddedServerProcess
from easyrl.metrics.event_log import read_events
from easyrl.runtime.machine import pin_process, usable_cpus


@dataclass(frozen=True)
class Workload:
    """Sizes of the run; responses draw their lengths from a model that ends at random."""

    batch_size: int = 48
    num_generations: int = 8
    prompt_tokens: int = 32
    min_tokens: int = 128
    max_tokens: int = 320
    max_inflight: int = 10
    max_tokens_per_micro_batch: int = 2000
    hidden_size: int = 128
    num_layers: int = 3


@dataclass(frozen=True)
class Batch:
    """Spans of one batch, seconds."""

    wall: float
    generation: float  # dispatch to the last group
    training: float  # sum of micro-batches
    step: float  # after the last micro-batch
    sync: float
    first_group: float
    tail: float  # from the last group's arrival to the end of training


def main() -> None:
    arguments = _parse()
    work = Workload(
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        max_inflight=arguments.max_inflight,
    )
    print(
        f"{work.batch_size} prompts x {work.num_generations} responses of {work.min_tokens} to "
        f"{work.max_tokens} tokens, {work.max_inflight} sequences in flight, one core each side"
    )
    folder = Path(tempfile.mkdtemp(prefix="easyrl-overlap-"))
    try:
        model = write_random_model(
            folder / "model", hidden_size=work.hidden_size, num_layers=work.num_layers
        )
        num_prompts = work.batch_size * (arguments.batches + 1)
        prompts = write_prompts(folder / "prompts.jsonl", num_prompts, work.prompt_tokens)
        rows = []
        for repeat in range(arguments.repeats):
            runs = {
                mode: _run(mode, folder / f"{mode}-{repeat}", model, prompts, work)
                for mode in ("sync", "async")
            }
            rows.append(_row(runs["sync"], runs["async"]))
            print("  ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()))
        print(json.dumps({name: _median(rows, name) for name in rows[0]}))
    finally:
        shutil.rmtree(folder)


def _row(sync: Sequence[Batch], overlapped: Sequence[Batch]) -> dict[str, float]:
    sync_s, async_s = sum(b.wall for b in sync), sum(b.wall for b in overlapped)
    bound_s = sum(max(b.generation, b.training) + b.sync + b.step for b in sync)
    return {
        "sync_s": sync_s,
        "async_s": async_s,
        "async_over_sync": sync_s / async_s,
        "bound_s": bound_s,
        "efficiency": bound_s / async_s,
        "sync_generation_s": sum(b.generation for b in sync),
        "sync_training_s": sum(b.training for b in sync),
        "async_generation_s": sum(b.generation for b in overlapped),
        "async_training_s": sum(b.training for b in overlapped),
        "async_first_group_s": sum(b.first_group for b in overlapped),
        "async_tail_s": sum(b.tail for b in overlapped),
        "async_sync_and_step_s": sum(b.sync + b.step for b in overlapped),
    }


def _run(mode: str, run_dir: Path, model: Path, prompts: Path, work: Workload) -> list[Batch]:
    """One training run; the first batch, which warms everything up, is not counted."""
    cpus = usable_cpus()
    trainer_cpu, server_cpu = cpus[0], cpus[-1]
    total = work.prompt_tokens + work.max_tokens
    options = ["--max-model-len", str(total + 32), "--num-threads", "1"]
    options += ["--max-num-seqs", str(work.max_inflight)]
    run_dir.mkdir()
    with EmbeddedServerProcess(
        model, options, cpus=[server_cpu], log=run_dir / "server.log"
    ) as server:
        overrides = [
            f"run.mode={mode}",
            f"run.output_dir={run_dir}",
            f"model.path={model}",
            f"data.files=[{prompts}]",
            f"data.max_prompt_tokens={work.prompt_tokens + 8}",
            f"inference.endpoints=[{server.url}]",
            f"inference.max_inflight={work.max_inflight}",
            f"trainer.batch_size={work.batch_size}",
            f"trainer.max_tokens_per_micro_batch={work.max_tokens_per_micro_batch}",
            f"rollout.num_generations={work.num_generations}",
            f"rollout.min_tokens={work.min_tokens}",
            "rollout.allow_off_policy_sampling=true",
            f"rollout.max_tokens={work.max_tokens}",
        ]
        command = [sys.executable, "-m", "easyrl.train", "benchmarks/overlap.yaml", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (run_dir / "trainer.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            pin_process(process.pid, [trainer_cpu])
            if process.wait() != 0:
                sys.exit((run_dir / "trainer.log").read_text()[-3000:])
    return _batches(run_dir / "events-rank0.jsonl")[1:]


def _batches(path: Path) -> list[Batch]:
    """Spans of every batch from the run's own event log."""
    batches: list[Batch] = []
    dispatched = first_group = last_group = start = trained = step = sync_start = 0.0
    training = 0.0
    for event in read_events(path):
        t = event["t"]
        match event["event"]:
            case "batch_dispatched":
                dispatched, first_group, training = t, 0.0, 0.0
            case "group_ready":
                first_group = first_group or t
                last_group = t
            case "micro_batch_start":
                start = t
            case "micro_batch_end":
                training += t - start
                trained = t
            case "step":
                step = t
            case "sync_start":
                sync_start = t
            case "sync_end" if step:
                batches.append(
                    Batch(
                        wall=t - dispatched,
                        generation=last_group - dispatched,
                        training=training,
                        step=sync_start - trained,
                        sync=t - sync_start,
                        first_group=first_group - dispatched,
                        tail=max(0.0, trained - last_group),
                    )
                )
    return batches


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
    return round(statistics.median(row[name] for row in rows), 3)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=Workload.hidden_size)
    parser.add_argument("--num-layers", type=int, default=Workload.num_layers)
    parser.add_argument("--max-inflight", type=int, default=Workload.max_inflight)
    return parser.parse_args()


if __name__ == "__main__":
    main()
