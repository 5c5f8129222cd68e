"""Seconds per optimizer step of EasyRL and of TRL's ``GRPOTrainer``, the same work on one machine.

``python -m benchmarks.end_to_end [--workloads short "long tail"] [--pairs 5] [--resume]``

Both sides have the same model, prompts, batch, G, lengths, AdamW, learning rate and clip, and all
cores of this machine. Ours is ``easyrl train`` with an embedded server that it starts itself,
defaults otherwise. TRL generates with ``transformers``' batched ``generate``, its micro-batch is
the fastest of a first pass; on *one machine* it has the better of one thread and a thread per core,
as *separate devices*, one core for each phase, one thread. Runs take turns; medians over a run's
steps, then over pairs. What is measured goes to ``OUT/rows.jsonl`` at once; with ``--resume`` what
is there is not measured again. The last line printed is one JSON object.

In ``benchmarks/parts/end_to_end``: ``workloads.py`` says what is trained, ``ours.py`` and
``trl_side.py`` train it, ``bound.py`` says what no schedule could beat, ``rows.py`` keeps what was
measured, ``report.py`` compares it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from benchmarks.parts.end_to_end import bound, ours, trl_side
from benchmarks.parts.end_to_end.report import Comparison, spans
from benchmarks.parts.end_to_end.rows import Key, Row, Rows, Step
from benchmarks.parts.end_to_end.workloads import WORKLOADS, Workload, write_model
from easyrl.runtime.machine import usable_cpus

START_S = 60.0  # of a pair's processes, added up


@dataclass
class Measurement:
    """The runs of one workload, each measured once.

    Attributes:
        folder: of this workload.
        overrides: of our command line.
    """

    work: Workload
    model: Path
    folder: Path
    rows: Rows
    cores: ours.Cores
    overrides: Sequence[str]
    with_trl: bool

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prompts = self.folder / "prompts.jsonl"
        self._num_steps = self.work.num_warm_up + self.work.num_steps
        self.work.write_prompts(self._prompts, (self._num_steps + 1) * self.work.batch_size)
        self._threads = sorted({1, len(usable_cpus())}) if self.with_trl else []
        self._settings = " ".join([self.cores, *self.overrides])

    def compare(self, num_pairs: int) -> Comparison:
        """All pairs; the order within a pair changes."""
        micro_batch = self._micro_batch() if self.with_trl else 0
        our_rows: list[Row] = []
        bounds: list[Row] = []
        trl: dict[int, list[Row]] = {n: [] for n in self._threads}
        for pair in range(num_pairs):
            for side in (0, *self._threads) if pair % 2 == 0 else (*reversed(self._threads), 0):
                if side == 0:
                    our_rows.append(self._ours(pair))
                    bounds.append(self._bound(pair, our_rows[-1]))
                else:
                    trl[side].append(self._trl(pair, side, micro_batch))
        return Comparison(self.work, our_rows, trl, bounds)

    def _micro_batch(self) -> int:
        """TRL's fastest, with a thread per core."""
        keys = {m: self._key("tuning", 0, f"micro-batch {m}") for m in self.work.micro_batches}
        if not all(key in self.rows for key in keys.values()):
            num_threads = self._threads[-1]
            found = trl_side.tune(self.work, self.model, self._prompts, self.folder, num_threads)
        train_s = {
            m: self.rows.get(key, lambda m=m: found[m]).spans["train"]  # type: ignore[misc]
            for m, key in keys.items()
        }
        listed = ", ".join(f"{m} sequences {seconds:.2f} s" for m, seconds in train_s.items())
        best = min(train_s, key=train_s.__getitem__)
        print(f"  TRL's micro-batch: {best} (training a batch: {listed})", flush=True)
        return best

    def _key(self, side: str, pair: int, settings: str) -> Key:
        return Key(self.work.name, side, pair, self.work.num_steps, settings)

    def _ours(self, pair: int) -> Row:
        def measure() -> list[Step]:
            run_dir = self._run_dir(pair)
            shutil.rmtree(run_dir, ignore_errors=True)
            steps = ours.train(
                self.work,
                self.model,
                self._prompts,
                run_dir,
                self._num_steps,
                self.cores,
                self.overrides,
            )
            return steps[self.work.num_warm_up :]

        return _told(self.rows.get(self._key("ours", pair, self._settings), measure))

    def _bound(self, pair: int, run: Row) -> Row:
        def measure() -> list[Step]:
            return [bound.measure(self.work, self._run_dir(pair), run.steps, self.folder)]

        row = self.rows.get(self._key("bound", pair, self._settings), measure)
        shutil.rmtree(self._run_dir(pair), ignore_errors=True)
        return _told(row)

    def _trl(self, pair: int, num_threads: int, micro_batch: int) -> Row:
        def measure() -> list[Step]:
            runs = trl_side.train(
                self.work,
                self.model,
                self._prompts,
                self.folder,
                self._num_steps,
                num_threads,
                [micro_batch],
            )
            return runs[micro_batch][self.work.num_warm_up :]

        side = f"TRL, {num_threads} thread(s)"
        return _told(self.rows.get(self._key(side, pair, f"micro-batch {micro_batch}"), measure))

    def _run_dir(self, pair: int) -> Path:
        return self.folder / f"run-{pair}"


def _told(row: Row) -> Row:
    print(f"  {row.key.side:16} {row.step_s:7.2f}   {spans([row])}", flush=True)
    return row


def main() -> int:
    arguments = _parse()
    try:
        if not arguments.without_trl:
            trl_side.require_trl()
    except ValueError as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: what was started ends too
    chosen = [WORKLOADS[name] for name in arguments.workloads]
    if arguments.steps is not None:
        chosen = [replace(work, num_steps=arguments.steps) for work in chosen]
    _estimate(chosen, arguments.pairs)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    rows_file = out / "rows.jsonl"
    if rows_file.exists() and not arguments.resume:
        rows_file.rename(out / f"rows-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    rows = Rows(rows_file)
    compared = []
    for work in chosen:
        print(f"{work.name}: {work.batch_size} x {work.num_generations}", flush=True)
        measurement = Measurement(
            work,
            write_model(work, out / "models"),
            out / work.name.replace(" ", "-"),
            rows,
            arguments.cores,
            arguments.overrides,
            not arguments.without_trl,
        )
        try:
            comparison = measurement.compare(arguments.pairs)
        except RuntimeError as error:  # one of the runs has failed
            print(f"end_to_end: {error}", file=sys.stderr)
            return 1
        print(comparison.table(), flush=True)
        compared.append(comparison.row())
    print(json.dumps({"rows": compared}))
    return 0


def _estimate(chosen: Sequence[Workload], num_pairs: int) -> None:
    """On a quiet machine of two cores."""
    seconds = sum(
        num_pairs * (START_S + work.pair_s * work.num_steps / WORKLOADS[work.name].num_steps)
        for work in chosen
    )
    tuning = sum(work.tuning_s for work in chosen)
    print(
        f"about {(seconds + tuning) / 60:.0f} minutes on two cores, and one for the demo's model "
        "if it is not there",
        flush=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.end_to_end", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="that count, in each run; default: the workload's"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/end_to_end"), help="folder")
    parser.add_argument("--without-trl", action="store_true", help="only ours and its bound")
    parser.add_argument("--resume", action="store_true", help="keep what was measured in OUT")
    parser.add_argument(
        "--cores",
        choices=get_args(ours.Cores),
        default="default",
        help="halves: server and trainer are each given threads for half of the cores",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        default=[],
        metavar="key.path=value",
        help="further settings of our run",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
