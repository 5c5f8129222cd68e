"""``inference.max_inflight: auto`` against fixed numbers, on the workloads of ``end_to_end``.

``python -m benchmarks.max_inflight [--workloads short "long tail"] [--repeats 5] [--quick]``

A training run with a server that it starts itself, TRL left out; with ``--engine vllm`` a real
vLLM, whose environment's interpreter is named by EASYRL_VLLM_PYTHON. In each run ``auto`` has the
first five batches, in which it tries and chooses. Behind them every fixed number, the chosen one
among them, has a batch in turn, round after round in changing order, so that all are measured in
one process and a busy machine hits all alike. Medians over the batches of a number in a run, then
over the runs. A number above a batch's responses is the same as any other such: 256 stands for
them.

Rows go to ``OUT/ENGINE/rows.jsonl``; with ``--resume`` what is there of this commit is not measured
again, with ``--any-revision`` of other commits neither; where OUT has none, the rows that were kept
in ``docs/max-inflight-ENGINE.jsonl`` are gone on with. The last line printed is one JSON object:
for each workload what the chosen number took (``auto_s``), the best fixed number and what that
took, their ratio, and what was chosen in each run.

In ``benchmarks/parts/max_inflight``: ``rotating_trainer.py`` is the trainer whose limits are given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks.parts.end_to_end import ours
from benchmarks.parts.end_to_end.revision import revision
from benchmarks.parts.end_to_end.rows import Key, Measured, Row, Rows
from benchmarks.parts.end_to_end.workloads import WORKLOADS, Workload, write_model
from benchmarks.parts.max_inflight.rotating_trainer import NUM_UNCOUNTED
from benchmarks.parts.row_file import rows_file
from benchmarks.parts.worktree import ROOT
from easyrl.demo.servers import Engine, vllm_python

FIXED = (16, 32, 64, 128, 256)
CHOSE = "chose"  # among a step's spans
ROTATING_TRAINER = ROOT / "benchmarks" / "parts" / "max_inflight" / "rotating_trainer.py"
START_S = {"embedded": 25.0, "vllm": 60.0}  # of a run's processes
STEP_S = {"short": 0.6, "no-signal": 0.5, "long prompt": 4.2, "long tail": 4.8, "KL": 5.0}
ROUNDS = {"short": 8, "no-signal": 8}  # batches of each number in a run, where there are not ...
ROUNDS_OF_OTHERS = 3


@dataclass
class Measurement:
    """The runs of one workload.

    Attributes:
        limits: fixed numbers, ascending.
        num_rounds: batches of each number in a run.
        overrides: of the command line.
    """

    work: Workload
    model: Path
    folder: Path
    rows: Rows
    limits: Sequence[int]
    num_rounds: int
    cores: ours.Cores
    overrides: Sequence[str]
    revision: str

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prompts = self.folder / "prompts.jsonl"
        self._turns = turns(self.limits, self.num_rounds)
        total = NUM_UNCOUNTED + len(self._turns) + 1
        self.work.write_prompts(self._prompts, total * self.work.batch_size)

    def compare(self, num_repeats: int) -> dict[str, object]:
        """The workload's object of the last line."""
        runs = [self._run(repeat) for repeat in range(num_repeats)]
        return {"workload": self.work.name, **compared(self.limits, runs)}

    def _run(self, repeat: int) -> tuple[int, dict[int, float]]:
        """What ``auto`` chose, one of the limits, and the median seconds of each."""
        settings = " ".join([self.cores, *map(str, self._turns), *self.overrides])
        key = Key(
            self.work.name, "ours", repeat, len(self._turns), settings, revision=self.revision
        )
        row = self.rows.get(key, partial(self._measure, repeat))
        choice = chosen(row, self.limits)
        seconds = by_limit(self._turns, row)
        listed = "  ".join(f"{limit}: {each:.3f}" for limit, each in seconds.items())
        print(f"  run {repeat}: chose {choice}   {listed}", flush=True)
        return choice, seconds

    def _measure(self, repeat: int) -> Measured:
        run_dir = self.folder / f"run-{repeat}"
        choice_file = self.folder / f"choice-{repeat}.json"
        shutil.rmtree(run_dir, ignore_errors=True)
        turns_argument = ",".join(map(str, self._turns))
        steps = ours.train(
            self.work,
            self.model,
            self._prompts,
            run_dir,
            NUM_UNCOUNTED + len(self._turns),
            self.cores,
            ["inference.max_inflight=auto", *self.overrides],
            seed=repeat,
            trainer=[str(ROTATING_TRAINER), str(choice_file.absolute()), turns_argument],
        )
        (choice,) = json.loads(choice_file.read_text())  # of one endpoint
        shutil.rmtree(run_dir)
        counted = steps[NUM_UNCOUNTED:]
        for step in counted:
            step.spans[CHOSE] = choice
        return Measured(counted)


def turns(limits: Sequence[int], num_rounds: int) -> list[int]:
    """Each limit once a round, in an order that turns."""
    rounds = [[*limits[n % len(limits) :], *limits[: n % len(limits)]] for n in range(num_rounds)]
    return [limit for each in rounds for limit in each]


def chosen(row: Row, limits: Sequence[int]) -> int:
    """What ``auto`` came to in a run; one above all responses is the largest of ``limits``.

    Raises ``RuntimeError`` if it is not among them.
    """
    choice = int(row.steps[0].spans[CHOSE])
    if choice < limits[-1] and choice not in limits:
        raise RuntimeError(f"auto chose {choice}, which is not measured: add it to --limits")
    return min(choice, limits[-1])


def by_limit(turns: Sequence[int], row: Row) -> dict[int, float]:
    """Median seconds of a run's batches with each limit."""
    return {
        limit: statistics.median(
            step.seconds for turn, step in zip(turns, row.steps, strict=True) if turn == limit
        )
        for limit in sorted(set(turns))
    }


def compared(
    limits: Sequence[int], runs: Sequence[tuple[int, Mapping[int, float]]]
) -> dict[str, object]:
    """The chosen number of each run against the best one of all runs."""
    fixed_s = {limit: statistics.median(seconds[limit] for _, seconds in runs) for limit in limits}
    auto_s = statistics.median(seconds[choice] for choice, seconds in runs)
    best = min(fixed_s, key=fixed_s.__getitem__)
    return {
        "auto_s": round(auto_s, 4),
        "best": best,
        "best_s": round(fixed_s[best], 4),
        "ratio": round(auto_s / fixed_s[best], 3),
        "ratio_in_a_run": round(
            statistics.median(seconds[choice] / seconds[best] for choice, seconds in runs), 3
        ),
        "chose": [choice for choice, _ in runs],
        "fixed_s": {str(limit): round(each, 4) for limit, each in fixed_s.items()},
        "runs": len(runs),
    }


def limits_of(work: Workload, wanted: Sequence[int]) -> list[int]:
    """Those that differ for the workload: of numbers above its responses only the largest."""
    below = sorted(limit for limit in wanted if limit < work.num_sequences)
    above = [limit for limit in wanted if limit >= work.num_sequences]
    return below + ([max(above)] if above else [])


def main() -> int:
    arguments = _parse()
    overrides = list(arguments.overrides)
    try:
        measured = revision()
        if arguments.engine == "vllm":
            python = vllm_python()
            overrides += ["inference.launch.engine=vllm", f"inference.launch.python={python}"]
    except ValueError as error:
        print(f"max_inflight: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: what was started ends too
    works = [WORKLOADS[name] for name in arguments.workloads]
    _estimate(arguments, works)
    out: Path = arguments.out / arguments.engine
    out.mkdir(parents=True, exist_ok=True)
    kept = ROOT / "docs" / f"max-inflight-{arguments.engine}.jsonl"
    rows = Rows(
        rows_file(out, kept, resume=arguments.resume), of_any_revision=arguments.any_revision
    )
    lines = []
    for work in works:
        print(f"{work.name}: {work.batch_size} x {work.num_generations}", flush=True)
        measurement = Measurement(
            work,
            write_model(work, arguments.out / "models"),
            out / work.name.replace(" ", "-"),
            rows,
            limits_of(work, arguments.limits),
            _num_rounds(arguments, work),
            arguments.cores,
            overrides,
            measured,
        )
        try:
            lines.append(measurement.compare(arguments.repeats))
        except RuntimeError as error:  # one of the runs has failed
            print(f"max_inflight: {error}", file=sys.stderr)
            return 1
        print(f"  {lines[-1]}", flush=True)
    print(json.dumps({"engine": arguments.engine, "rows": lines}))
    return 0


def _num_rounds(arguments: argparse.Namespace, work: Workload) -> int:
    return arguments.rounds or ROUNDS.get(work.name, ROUNDS_OF_OTHERS)


def _estimate(arguments: argparse.Namespace, works: Sequence[Workload]) -> None:
    """On a quiet machine of two cores, with the embedded server."""
    seconds = 0.0
    for work in works:
        num_turns = _num_rounds(arguments, work) * len(limits_of(work, arguments.limits))
        run_s = START_S[arguments.engine] + (NUM_UNCOUNTED + num_turns) * STEP_S[work.name]
        seconds += arguments.repeats * run_s
    print(
        f"about {seconds / 60:.0f} minutes on two cores, more with vLLM, and one for the demo's "
        "model if it is not there",
        flush=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.max_inflight", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: all")
    parser.add_argument("--engine", choices=get_args(Engine), default="embedded")
    parser.add_argument("--repeats", type=int, help="runs; default: 5")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"batches of each number in a run; default: {ROUNDS_OF_OTHERS}, of small workloads 8",
    )
    parser.add_argument("--limits", type=int, nargs="+", default=FIXED, help="fixed ones")
    parser.add_argument("--out", type=Path, default=Path("runs/max_inflight"), help="folder")
    parser.add_argument("--resume", action="store_true", help="keep what was measured in OUT")
    parser.add_argument(
        "--any-revision", action="store_true", help="with --resume: what other commits measured too"
    )
    parser.add_argument("--quick", action="store_true", help="one short run of two: it works")
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
    if arguments.quick:
        arguments.workloads = arguments.workloads or ["short", "long tail"]
        arguments.repeats = arguments.repeats or 1
        arguments.rounds = arguments.rounds or 1
    arguments.workloads = arguments.workloads or list(WORKLOADS)
    arguments.repeats = arguments.repeats or 5
    return arguments


if __name__ == "__main__":
    sys.exit(main())
