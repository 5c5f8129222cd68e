"""Seconds per optimizer step of EasyRL and of TRL's ``GRPOTrainer``, the same work on one machine.

``python -m benchmarks.end_to_end [--workloads short "long tail"] [--pairs 5] [--resume]``

Both sides have the same model, prompts, batch, G, lengths, AdamW, learning rate and clip, and all
cores of this machine. Ours is ``easyrl train`` with an embedded server that it starts itself,
defaults otherwise. TRL generates with ``transformers``' batched ``generate``; its micro-batch is
the fastest of a first pass, for each number of threads. On *one machine* it has the better of one
thread and a thread per core, as *separate devices*, one core for each phase, one thread. Runs take
turns, each pair has a seed of its own; medians over a run's steps, then over pairs.

That both did the same work is checked against each of TRL's sides, and said in the last line
(``same_work``): rewards and response lengths step by step, within four standard errors; and for the
demo's model (``short``, ``no-signal``) something that only training moves, the log-probability of
held-out worked sums: neither side's rises by less than half of the other's. Exit status 3 if they
did not, or if ours came out faster than nothing could be (``bound_shared_s``); 1 if a run failed, 2
if nothing could start.

``efficiency`` is ``bound_s``, a core for each phase, over ours. It may be above 1: ours trains on
both cores while the server rests, which ``bound_shared_s`` allows for. For each ratio that was
missed a line says what was wanted, what was reached, and what bounds and estimate allow. ``phase``
spans are what the trainer's thread did in the rest of a step.

Where six steps count, five steps of ours go before them, in which ``inference.max_inflight: auto``
tries; TRL, which chooses nothing, trains the last batch of these and the same six.

With ``--base`` ours of an earlier revision takes its turn in each pair, with its own defaults.

What is measured goes to ``OUT/rows.jsonl`` at once; with ``--resume`` what is there of this commit
is not measured again, with ``--keep-trl`` TRL's rows of other commits neither (then the sides did
not take turns, which the table says), with ``--any-revision`` those of no side. Where OUT has none,
the rows that were kept in ``docs/end-to-end-rows.jsonl`` are gone on with, so that an hour here and
there adds up. A commit that changes docs, README or tests alone counts as the one before it. The
last line printed is one JSON object; ``revisions`` is the number of commits that a workload's rows
are of, ``took_turns`` says whether the sides of each pair are of one.

In ``benchmarks/parts/end_to_end``: ``workloads.py`` says what is trained, ``ours.py`` and
``trl_side.py`` train it, ``bound.py`` says how fast it could be at most, ``rows.py`` keeps what was
measured, ``report.py`` compares it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.parts.end_to_end import bound, ours, trl_side
from benchmarks.parts.end_to_end.heldout import heldout_logprob
from benchmarks.parts.end_to_end.report import Comparison, spans
from benchmarks.parts.end_to_end.revision import revision
from benchmarks.parts.end_to_end.rows import Key, Measured, Row, Rows, Step
from benchmarks.parts.end_to_end.workloads import WORKLOADS, Workload, write_model
from benchmarks.parts.row_file import rows_file
from benchmarks.parts.worktree import BASE, ROOT, NoCheckout, worktree
from easyrl.runtime.machine import usable_cpus

KEPT = ROOT / "docs" / "end-to-end-rows.jsonl"
START_S = 85.0  # of a pair's processes, added up


class Base(NamedTuple):
    """An earlier revision that is measured too."""

    name: str
    checkout: Path


@dataclass
class Measurement:
    """The runs of one workload, each measured once.

    Attributes:
        folder: of this workload.
        overrides: of our command line.
        revision: of the code that is measured.
        keep_trl: whether TRL's rows of other revisions count.
    """

    work: Workload
    model: Path
    folder: Path
    rows: Rows
    cores: ours.Cores
    overrides: Sequence[str]
    with_trl: bool
    revision: str
    keep_trl: bool
    base: Base | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prompts = self.folder / "prompts.jsonl"
        num_prompts = max(
            (self.work.num_our_steps + 1) * self.work.batch_size,
            (trl_side.TUNING_STEPS + 1) * trl_side.tuning_batch(self.work),
        )
        self.work.write_prompts(self._prompts, num_prompts)
        self._trl_prompts = self.folder / "trl-prompts.jsonl"
        lines = self._prompts.read_text().splitlines(keepends=True)
        self._trl_prompts.write_text("".join(lines[trl_side.num_skipped(self.work) :]))
        self._threads = sorted({1, len(usable_cpus())}) if self.with_trl else []
        self._settings = " ".join([self.cores, *self.overrides])

    def compare(self, num_pairs: int) -> Comparison:
        """All pairs; the order within a pair changes."""
        micro_batches = {n: self._micro_batch(n) for n in self._threads}
        our_rows: list[Row] = []
        bounds: list[Row] = []
        before: list[Row] = []
        trl: dict[int, list[Row]] = {n: [] for n in self._threads}
        for pair in range(num_pairs):
            for side in (0, *self._threads) if pair % 2 == 0 else (*reversed(self._threads), 0):
                if side == 0:
                    our_rows.append(self._ours(pair))
                    bounds.append(self._bound(pair, our_rows[-1]))
                    if self.base is not None:
                        before.append(self._before(pair, self.base))
                else:
                    trl[side].append(self._trl(pair, side, micro_batches[side]))
        untrained = heldout_logprob(self.model) if self.work.learns else None
        return Comparison(self.work, our_rows, trl, bounds, before, untrained)

    def _micro_batch(self, num_threads: int) -> int:
        """TRL's fastest with so many threads."""
        measured: dict[int, Measured] = {}

        def measure(size: int) -> Measured:
            if not measured:  # all of them in one process
                measured.update(
                    trl_side.tune(self.work, self.model, self._prompts, self.folder, num_threads)
                )
            return measured[size]

        side = f"tuning, {num_threads} thread(s)"
        runs = {
            size: self.rows.get(
                self._key(side, 0, f"micro-batch {size}"),
                lambda size=size: measure(size),  # type: ignore[misc]
                of_any_revision=self.keep_trl,
            ).measured
            for size in self.work.micro_batches
        }
        best = trl_side.fastest(runs)
        listed = ", ".join(
            f"{m} sequences {trl_side.train_s(run):.2f} s" for m, run in runs.items()
        )
        print(f"  TRL's micro-batch, {num_threads} thread(s): {best} ({listed})", flush=True)
        return best

    def _key(self, side: str, pair: int, settings: str) -> Key:
        num_tried = 0 if side.startswith("tuning") else self.work.num_tried
        steps = self.work.num_steps
        return Key(self.work.name, side, pair, steps, settings, self.revision, num_tried)

    def _ours(self, pair: int) -> Row:
        def measure() -> Measured:
            run_dir = self._run_dir(pair)
            steps = self._train(run_dir, pair, self.overrides)
            trained = run_dir / ours.TRAINED_MODEL
            return Measured(steps, heldout_logprob(trained) if self.work.learns else None)

        return _told(self.rows.get(self._key("ours", pair, self._settings), measure))

    def _before(self, pair: int, base: Base) -> Row:
        """Our run by an earlier revision, with that one's defaults."""

        def measure() -> Measured:
            run_dir = self.folder / f"before-{pair}"
            steps = self._train(run_dir, pair, checkout=base.checkout)
            shutil.rmtree(run_dir)
            return Measured(steps)

        return _told(self.rows.get(self._key("before", pair, f"{self.cores} {base.name}"), measure))

    def _train(
        self, run_dir: Path, pair: int, overrides: Sequence[str] = (), checkout: Path = ROOT
    ) -> list[Step]:
        """The steps that count of a run of ours, whose folder is left."""
        shutil.rmtree(run_dir, ignore_errors=True)
        steps = ours.train(
            self.work,
            self.model,
            self._prompts,
            run_dir,
            self.work.num_our_steps,
            self.cores,
            overrides,
            seed=pair,
            checkout=checkout,
        )
        return steps[self.work.num_our_warm_up :]

    def _bound(self, pair: int, run: Row) -> Row:
        def measure() -> Measured:
            return Measured(
                [*bound.measure(self.work, self._run_dir(pair), run.steps, self.folder)]
            )

        row = self.rows.get(self._key("bound", pair, self._settings), measure)
        shutil.rmtree(self._run_dir(pair), ignore_errors=True)
        return _told(row)

    def _trl(self, pair: int, num_threads: int, micro_batch: int) -> Row:
        def measure() -> Measured:
            runs = trl_side.train(
                self.work,
                self.model,
                self._trl_prompts,
                self.folder,
                self.work.num_warm_up + self.work.num_steps,
                num_threads,
                [micro_batch],
                pair,
                measure_heldout=self.work.learns,
            )
            run = runs[micro_batch]
            return Measured(run.steps[self.work.num_warm_up :], run.heldout)

        key = self._key(f"TRL, {num_threads} thread(s)", pair, f"micro-batch {micro_batch}")
        return _told(self.rows.get(key, measure, of_any_revision=self.keep_trl))

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
        measured = revision()
    except ValueError as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: what was started ends too
    with ExitStack() as opened:
        base = None
        if arguments.base is not None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="easyrl-base-")))
            try:
                checkout = opened.enter_context(worktree(arguments.base, folder / "checkout"))
            except NoCheckout as error:
                print(f"end_to_end: --base: {error}", file=sys.stderr)
                return 2
            base = Base(arguments.base, checkout)
        return _measure(arguments, measured, base)


def _measure(arguments: argparse.Namespace, measured: str, base: Base | None) -> int:
    """All workloads; returns the exit status."""
    chosen = [WORKLOADS[name] for name in arguments.workloads]
    if arguments.steps is not None:
        chosen = [replace(work, num_steps=arguments.steps) for work in chosen]
    _estimate(chosen, arguments.pairs)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    path = rows_file(out, KEPT, resume=arguments.resume)
    rows = Rows(path, of_any_revision=arguments.any_revision)
    compared: list[Comparison] = []
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
            measured,
            arguments.keep_trl,
            base,
        )
        try:
            comparison = measurement.compare(arguments.pairs)
        except RuntimeError as error:  # one of the runs has failed
            print(f"end_to_end: {error}", file=sys.stderr)
            return 1
        print(comparison.table(), flush=True)
        compared.append(comparison)
    print(json.dumps({"rows": [comparison.row() for comparison in compared]}))
    return exit_status(compared)


def exit_status(compared: Sequence[Comparison]) -> int:
    """3 if what was compared does not bear a conclusion; says which."""
    status = 0
    for comparison in compared:
        if not comparison.is_same_work:
            print(f"end_to_end: {comparison.work.name}: NOT THE SAME WORK", file=sys.stderr)
            status = 3
        if not comparison.is_bound_kept:
            print(f"end_to_end: {comparison.work.name}: faster than its bound", file=sys.stderr)
            status = 3
    return status


def _estimate(chosen: Sequence[Workload], num_pairs: int) -> None:
    """On a quiet machine of two cores."""
    total = 0.0
    for work in chosen:
        pair_s = START_S + work.pair_s * work.num_steps / WORKLOADS[work.name].num_steps
        seconds = num_pairs * pair_s + work.tuning_s
        total += seconds
        print(
            f"{work.name}: about {seconds / 60:.0f} minutes "
            f"({num_pairs} x {pair_s:.0f} s, choosing micro-batches {work.tuning_s:.0f} s)"
        )
    print(
        f"all: about {total / 60:.0f} minutes on two cores, and one for the demo's model if it is "
        "not there",
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
    parser.add_argument(
        "--base",
        nargs="?",
        const=BASE,
        metavar="REV",
        help=f"an earlier revision of ours, which takes its turn; without REV {BASE}",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what this commit measured in OUT"
    )
    parser.add_argument(
        "--keep-trl", action="store_true", help="with --resume: TRL's rows of other commits too"
    )
    parser.add_argument(
        "--any-revision", action="store_true", help="with --resume: all rows of other commits too"
    )
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
    arguments = parser.parse_args()
    for option in ("keep_trl", "any_revision"):
        if getattr(arguments, option) and not arguments.resume:
            name = option.replace("_", "-")
            parser.error(f"--{name}: only with --resume; without, all is measured again")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
