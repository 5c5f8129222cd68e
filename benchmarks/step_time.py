"""Whether the phases of a step account for its time, with evaluations and a slow reward.

``python -m benchmarks.step_time [--steps 6] [--every 2] [--questions 200] [--reward-s 3]``

The demo (``make demo``) as it is, but for fewer steps, an evaluation of ``--questions`` every
``--every`` steps, and a second reward, of weight zero, that sleeps ``--reward-s`` seconds for each
group. The trainer thread's phases (``time/phase_*_s``, docs/architecture.md) of each step are added
up and compared with the time from report to report by another clock: the wall time of TensorBoard's
events. ``time/reward_s`` and ``time/evaluation_s`` are of what goes on beside the thread and not
among them; ``samples`` is the share of writing samples (``time/samples_s``), ``timeline`` that of
writing spans (``time/timeline_s``, processor time). The last line printed is one JSON object: the
phases' share of a step's time and of all, and that of both in the steps' time and the demo's, which
has the measurements before and after the training, too. Each report takes some milliseconds between
the two clocks, which count in steps of half a second.

``--steps 60 --every 20 --questions 512 --reward-s 0`` is ``make demo``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.parts.scratch import scratch
from easyrl.metrics.trackers import read_metrics
from easyrl.runtime.run_files import METRICS_FILE

ROOT = Path(__file__).resolve().parents[1]
PHASE = "time/phase_"
SLOW_REWARD = """
import time


def slow(prompt, texts, token_ids):
    time.sleep({seconds})
    return [0.0 for _ in texts]
"""
BESIDE = ("time/reward_s", "time/evaluation_s", "time/samples_s", "time/timeline_s")


@dataclass(frozen=True)
class StepTime:
    """One step of a run."""

    step: int
    wall_s: float  # from the report before to its own
    phases: Mapping[str, float]  # seconds of the trainer's thread
    beside: Mapping[str, float]  # seconds of what is not among them, by metric

    @property
    def share(self) -> float:
        return sum(self.phases.values()) / self.wall_s

    def __str__(self) -> str:
        longest = sorted(self.phases.items(), key=lambda item: -item[1])
        parts = [f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= 0.005]
        beside = [f"{name.split('/')[1]} {seconds:.3f}" for name, seconds in self.beside.items()]
        return (
            f"step {self.step}: {self.wall_s:.2f} s, phases {self.share:.2%} ("
            f"{', '.join(parts)}); {', '.join(beside)}"
        )


def step_times(run_dir: Path) -> list[StepTime]:
    """All steps of a run but the first report, before which there is none."""
    reported_s = report_times(run_dir / "tensorboard")
    found = []
    for metrics in read_metrics(run_dir / METRICS_FILE):
        step = int(metrics["step"])
        if step - 1 not in reported_s or step not in reported_s:
            continue
        phases = {
            name.removeprefix(PHASE).removesuffix("_s"): seconds
            for name, seconds in metrics.items()
            if name.startswith(PHASE)
        }
        beside = {name: metrics[name] for name in BESIDE if name in metrics}
        found.append(StepTime(step, reported_s[step] - reported_s[step - 1], phases, beside))
    return found


def report_times(folder: Path) -> dict[int, float]:
    """When the first metric of each step was reported, in seconds of the wall clock."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    reported_s: dict[int, float] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            first_s = reported_s.get(event.step, event.wall_time)
            reported_s[event.step] = min(first_s, event.wall_time)
    return reported_s


def summary(steps: Sequence[StepTime], demo: Mapping[str, float]) -> dict[str, float]:
    shares = [step.share for step in steps]
    wall_s = sum(step.wall_s for step in steps)

    def total(name: str) -> float:
        return sum(step.beside.get(name, 0.0) for step in steps)

    return {
        "steps": len(steps),
        "seconds": round(wall_s, 1),
        "share_min": round(min(shares), 4),
        "share_median": round(statistics.median(shares), 4),
        "share_max": round(max(shares), 4),
        "share_of_all": round(sum(sum(s.phases.values()) for s in steps) / wall_s, 4),
        "reward_s": round(total("time/reward_s"), 2),
        "evaluation_s": round(total("time/evaluation_s"), 2),
        "samples_share_of_steps": round(total("time/samples_s") / wall_s, 5),
        "samples_share_of_demo": round(total("time/samples_s") / demo["seconds"], 5),
        "timeline_share_of_steps": round(total("time/timeline_s") / wall_s, 5),
        "timeline_share_of_demo": round(total("time/timeline_s") / demo["seconds"], 5),
    }


def main() -> None:
    arguments = _parse()
    with scratch("step-time", keep=arguments.keep) as made:
        reward = made.folder / "slow.py"
        reward.write_text(SLOW_REWARD.format(seconds=arguments.reward_s))
        run_dir = made.folder / "run"
        demo = run_demo(run_dir, reward, arguments)
        steps = step_times(run_dir)
    for step in steps:
        print(step)
    print(json.dumps(summary(steps, demo)))


def run_demo(run_dir: Path, reward: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The demo's own last line. What it prints goes to stderr."""
    command = [
        *(sys.executable, "-m", "easyrl.demo", "--run-dir", str(run_dir)),
        f"trainer.max_steps={arguments.steps}",
        f"evaluation.every_steps={arguments.every}",
        f"evaluation.data.max_records={arguments.questions}",
    ]
    if arguments.reward_s > 0:
        slow = f"{{file: {reward}, function: slow, weight: 0.0}}"
        command += [f"rewards=[{{name: exact}},{slow}]", f"scoring.num_workers={arguments.workers}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    if done.returncode != 0:
        sys.exit(f"step_time: the demo ended with status {done.returncode}; see above")
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return said


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2, help="steps between two evaluations")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--reward-s", type=float, default=3.0, help="0: the demo's reward alone")
    parser.add_argument("--workers", type=int, default=16, help="processes in which rewards sleep")
    parser.add_argument("--keep", action="store_true", help="leave the run's folder behind")
    return parser.parse_args()


if __name__ == "__main__":
    main()
