"""``inference.max_inflight: auto`` against fixed numbers, on the workloads of ``end_to_end``.

``python -m benchmarks.max_inflight [--workloads short "long tail"] [--repeats 5] [--quick]``

``easyrl train`` with a server that it starts itself, TRL left out; with ``--engine vllm`` a real
vLLM, whose environment's interpreter is named by EASYRL_VLLM_PYTHON. Each repeat runs every fixed
number and ``auto`` once, in an order that turns. The first five batches of a run do not count;
medians over a run's steps, then over repeats. From the third repeat on a fixed number is left out
whose fastest run took over 1.15 times the best median: it cannot become the best. Numbers above a
batch's responses are one and the same: 256 stands for them. Rows go to ``OUT/ENGINE/rows.jsonl``;
with ``--resume`` what is there is not measured again. The last line printed is one JSON object: for
each workload what ``auto`` took, the best fixed number and what that took, their ratio, and what
``auto`` had chosen in the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks.parts.end_to_end import ours
from benchmarks.parts.end_to_end.rows import Key, Measured, Row, Rows
from benchmarks.parts.end_to_end.workloads import WORKLOADS, Workload, write_model
from easyrl.demo.servers import Engine, vllm_python
from easyrl.metrics.event_log import read_events

NUM_UNCOUNTED = 5  # batches in which ``auto`` may try
FIXED = (16, 32, 64, 128, 256)
AUTO = "auto"
NUM_BEFORE_OUT = 2  # repeats that every number has
OUT_RATIO = 1.15  # fastest run over the best median; runs of one number differ by less
START_S = {"embedded": 25.0, "vllm": 60.0}  # of a run's processes
STEP_S = {"short": 0.6, "no-signal": 0.5, "long prompt": 4.0, "long tail": 2.5, "KL": 5.0}
QUICK_WORKLOADS, QUICK_FIXED = ["short", "long tail"], (32, 256)


@dataclass
class Measurement:
    """The runs of one workload.

    Attributes:
        limits: fixed numbers to be tried.
        num_steps: that count.
        overrides: of the command line.
    """

    work: Workload
    model: Path
    folder: Path
    rows: Rows
    limits: Sequence[int]
    num_steps: int
    cores: ours.Cores
    overrides: Sequence[str]
    chose: list[int] = field(default_factory=list)  # by repeat

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prompts = self.folder / "prompts.jsonl"
        total = NUM_UNCOUNTED + self.num_steps + 1
        self.work.write_prompts(self._prompts, total * self.work.batch_size)

    def compare(self, num_repeats: int) -> dict[str, object]:
        """The workload's object of the last line."""
        sides = [*map(str, self.limits), AUTO]
        taken: dict[str, list[Row]] = {side: [] for side in sides}
        for repeat in range(num_repeats):
            if repeat >= NUM_BEFORE_OUT:
                sides = still_in({side: [row.step_s for row in taken[side]] for side in sides})
            turn = repeat % len(sides)
            for side in sides[turn:] + sides[:turn]:
                taken[side].append(self._run(side, repeat))
        seconds = {side: statistics.median(r.step_s for r in rows) for side, rows in taken.items()}
        auto_s = seconds.pop(AUTO)
        best = min(seconds, key=seconds.__getitem__)
        return {
            "workload": self.work.name,
            "auto_s": round(auto_s, 4),
            "best": int(best),
            "best_s": round(seconds[best], 4),
            "ratio": round(auto_s / seconds[best], 3),
            "chose": self.chose,
            "fixed_s": {side: round(each, 4) for side, each in seconds.items()},
            "runs": {side: len(rows) for side, rows in taken.items()},
        }

    def _run(self, side: str, repeat: int) -> Row:
        run_dir = self.folder / f"run-{side}-{repeat}"
        settings = " ".join([self.cores, *self.overrides])
        key = Key(self.work.name, side, repeat, self.num_steps, settings)
        row = self.rows.get(key, partial(self._measure, side, run_dir))
        line = f"  {side:>5} {row.step_s:7.3f}   " + "  ".join(
            f"{name} {seconds:.3f}" for name, seconds in row.spans.items()
        )
        if side == AUTO:
            self.chose.append(chosen(run_dir))
            line += f"   chose {self.chose[-1]}"
        print(line, flush=True)
        return row

    def _measure(self, side: str, run_dir: Path) -> Measured:
        shutil.rmtree(run_dir, ignore_errors=True)
        steps = ours.train(
            self.work,
            self.model,
            self._prompts,
            run_dir,
            NUM_UNCOUNTED + self.num_steps,
            self.cores,
            [f"inference.max_inflight={side}", *self.overrides],
        )
        return Measured(steps[NUM_UNCOUNTED:])


def chosen(run_dir: Path) -> int:
    """The number that held in the end."""
    events = read_events(run_dir / ours.EVENTS_FILE)
    choices = [e["max_inflight"] for e in events if e["event"] == "max_inflight_chosen"]
    return choices[-1] if choices else FIXED[-1]


def still_in(taken: Mapping[str, Sequence[float]]) -> list[str]:
    """``auto``, and the numbers that may still be the best.

    Args:
        taken: each one's runs, seconds a step.
    """
    best = min(statistics.median(runs) for side, runs in taken.items() if side != AUTO)
    return [side for side, runs in taken.items() if side == AUTO or min(runs) <= OUT_RATIO * best]


def limits_of(work: Workload, wanted: Sequence[int]) -> list[int]:
    """Those that differ for the workload: of numbers above its responses only the largest."""
    below = sorted(limit for limit in wanted if limit < work.num_sequences)
    above = [limit for limit in wanted if limit >= work.num_sequences]
    return below + ([max(above)] if above else [])


def main() -> int:
    arguments = _parse()
    overrides = list(arguments.overrides)
    if arguments.engine == "vllm":
        try:
            python = vllm_python()
        except ValueError as error:
            print(f"max_inflight: {error}", file=sys.stderr)
            return 2
        overrides += ["inference.launch.engine=vllm", f"inference.launch.python={python}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: what was started ends too
    chosen_works = [WORKLOADS[name] for name in arguments.workloads]
    _estimate(arguments, chosen_works)
    out: Path = arguments.out / arguments.engine
    out.mkdir(parents=True, exist_ok=True)
    rows_file = out / "rows.jsonl"
    if rows_file.exists() and not arguments.resume:
        rows_file.rename(out / f"rows-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    rows = Rows(rows_file)
    compared = []
    for work in chosen_works:
        print(f"{work.name}: {work.batch_size} x {work.num_generations}", flush=True)
        measurement = Measurement(
            work,
            write_model(work, arguments.out / "models"),
            out / work.name.replace(" ", "-"),
            rows,
            limits_of(work, arguments.limits),
            arguments.steps,
            arguments.cores,
            overrides,
        )
        try:
            compared.append(measurement.compare(arguments.repeats))
        except RuntimeError as error:  # one of the runs has failed
            print(f"max_inflight: {error}", file=sys.stderr)
            return 1
        print(f"  {compared[-1]}", flush=True)
    print(json.dumps({"engine": arguments.engine, "rows": compared}))
    return 0


def _estimate(arguments: argparse.Namespace, works: Sequence[Workload]) -> None:
    """On a quiet machine of two cores, with the embedded server, if no number is left out."""
    num_batches = NUM_UNCOUNTED + arguments.steps
    seconds = sum(
        arguments.repeats
        * (1 + len(limits_of(work, arguments.limits)))
        * (START_S[arguments.engine] + num_batches * STEP_S[work.name])
        for work in works
    )
    print(
        f"at most about {seconds / 60:.0f} minutes on two cores, more with vLLM, and one for the "
        "demo's model if it is not there",
        flush=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.max_inflight", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: all")
    parser.add_argument("--engine", choices=get_args(Engine), default="embedded")
    parser.add_argument("--repeats", type=int, help="of every run; default: 5")
    parser.add_argument("--steps", type=int, help="that count, in each run; default: 10")
    parser.add_argument("--limits", type=int, nargs="+", help=f"fixed ones; default: {FIXED}")
    parser.add_argument("--out", type=Path, default=Path("runs/max_inflight"), help="folder")
    parser.add_argument("--resume", action="store_true", help="keep what was measured in OUT")
    parser.add_argument("--quick", action="store_true", help="one repeat of few runs: it works")
    parser.add_argument("--cores", choices=get_args(ours.Cores), default="default")
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        default=[],
        metavar="key.path=value",
        help="further settings of all runs",
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.workloads = arguments.workloads or (QUICK_WORKLOADS if quick else list(WORKLOADS))
    arguments.limits = arguments.limits or (QUICK_FIXED if quick else FIXED)
    arguments.repeats = arguments.repeats or (1 if quick else 5)
    arguments.steps = arguments.steps or (3 if quick else 10)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
