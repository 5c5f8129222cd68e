"""What each recipe learns on the demo's task, and that shuffled rewards teach it nothing.

``python -m benchmarks.recipes [--recipes grpo rpo] [--resume] [--out DIR]``

Every ready file in ``configs/recipes`` whose recipe trains on the policy's own samples is trained
as it is, with an embedded server that the run starts itself: asynchronously with three seeds,
synchronously with one, and with the rewards of each group shuffled, but for the distillation, which
learns from a teacher that is trained first. All start from one warm-started model. A run takes up
to a minute on two quiet cores. Accuracy is of 1,000 held-out problems, measured with plain
``transformers`` before and after.

What is measured goes to ``OUT/rows.jsonl`` at once; with ``--resume`` what is there of this commit
is not measured again, with ``--any-revision`` what is of other commits neither (the page says of
which). Where OUT has none, the rows that were kept in ``docs/recipes-results.jsonl`` are gone on
with. Table and figure are ``docs/recipes-results.md`` and ``.png``; where recipes or batches are
left out, both are in OUT. The last line printed is one JSON object. Exit status 3: something is not
as expected, and said; 1: a run failed, the others were measured all the same; 2: nothing could
start.

In ``benchmarks/parts/recipes``: ``ready_files.py`` says what is trained, ``run.py`` trains it,
``rows.py`` keeps what was measured, ``report.py`` says what it means.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from transformers.utils.logging import disable_progress_bar

from benchmarks.parts.end_to_end.revision import revision
from benchmarks.parts.recipes.ready_files import ReadyFile, ready_files
from benchmarks.parts.recipes.report import Learnt, markdown, page, plot
from benchmarks.parts.recipes.rows import Key, Kind, Measured, Row, Rows
from benchmarks.parts.recipes.run import Task
from benchmarks.parts.row_file import rows_file
from benchmarks.parts.worktree import ROOT

NAME = "recipes-results"
KEPT = ROOT / "docs" / f"{NAME}.jsonl"
RUN_S = 50.0  # of a run and its measurement, about


class Measurement:
    """All runs of a recipe, each measured once.

    Args:
        max_batches: of a run; None: as many as the ready file says.
        num_seeds: of the asynchronous runs.
    """

    def __init__(
        self, task: Task, rows: Rows, measured: str, max_batches: int | None, num_seeds: int
    ) -> None:
        self._task, self._rows, self._revision = task, rows, measured
        self._max_batches, self._num_seeds = max_batches, num_seeds

    def learnt(self, file: ReadyFile) -> Learnt:
        """Raises ``RuntimeError`` if a run fails."""
        return Learnt(
            file.recipe,
            file.streams,
            file.has_critic,
            file.clips,
            start=self._model("start", self._task.start),
            teacher=self._model("teacher", self._task.of_teacher) if file.has_teacher else None,
            asynchronous=[self._run(file, "async", seed) for seed in range(self._num_seeds)],
            sync=self._run(file, "sync", 0),
            shuffled=None if file.has_teacher else self._run(file, "shuffled", 0),
        )

    def num_runs(self, file: ReadyFile) -> int:
        return self._num_seeds + (1 if file.has_teacher else 2)

    def _model(self, kind: Kind, measure: Callable[[], Measured]) -> Row:
        """Of a model that no run has trained."""
        return self._rows.get(Key("", kind, 0, 0, "", self._revision), measure)

    def _run(self, file: ReadyFile, kind: Kind, seed: int) -> Row:
        num_batches = file.num_batches
        if self._max_batches is not None:
            num_batches = min(num_batches, self._max_batches)
        key = Key(file.recipe, kind, seed, num_batches, file.digest, self._revision)
        row = self._rows.get(key, lambda: self._task.run(file, kind, seed, num_batches))
        seconds, accuracy = row.measured.seconds, row.measured.accuracy
        print(f"{file.recipe:22} {kind:9} seed {seed}  {accuracy:.3f}  {seconds:4.0f} s")
        return row


def main() -> int:
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: what was started ends too
    try:
        files, measured = ready_files(), revision()
    except ValueError as error:  # ConfigError is one
        print(f"recipes: {error}", file=sys.stderr)
        return 2
    arguments = _parse(list(files))
    logging.disable(logging.WARNING)
    disable_progress_bar()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    path = rows_file(out, KEPT, resume=arguments.resume)
    rows = Rows(path, of_any_revision=arguments.any_revision)
    chosen = [files[name] for name in arguments.recipes]
    measurement = Measurement(Task(out), rows, measured, arguments.max_batches, arguments.seeds)
    num_runs = sum(map(measurement.num_runs, chosen))
    print(f"{num_runs} runs, about {num_runs * RUN_S / 60:.0f} minutes on two quiet cores in all")
    learnt, failed = [], 0
    for file in chosen:
        try:
            learnt.append(measurement.learnt(file))
        except RuntimeError as error:  # one of its runs has failed
            print(f"recipes: {error}", file=sys.stderr)
            failed += 1
    if not learnt:
        return 1
    is_whole = not failed and arguments.max_batches is None and set(arguments.recipes) == set(files)
    if is_whole:
        shutil.copyfile(path, KEPT)
    _write(learnt, ROOT / "docs" if is_whole else out, arguments.max_batches)
    for said in [problem for each in learnt for problem in each.problems()]:
        print(f"recipes: {said}", file=sys.stderr)
    print(json.dumps({"rows": [each.row() for each in learnt]}))
    return 1 if failed else 3 if any(each.problems() for each in learnt) else 0


def _write(learnt: Sequence[Learnt], folder: Path, num_batches: int | None) -> None:
    """Table and figure; both are said."""
    print(markdown(learnt))
    figure = folder / f"{NAME}.png"
    plot(learnt, figure)
    text = folder / f"{NAME}.md"
    text.write_text(page(learnt, figure.name, num_batches))
    print(f"{text} and {figure}")


def _parse(recipes: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.recipes", description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="folder")
    parser.add_argument("--resume", action="store_true", help="keep what is measured in OUT")
    parser.add_argument(
        "--any-revision", action="store_true", help="with --resume: what other commits measured too"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the asynchronous runs")
    parser.add_argument("--max-batches", type=int, help="of a run; default: as the files say")
    arguments = parser.parse_args()
    if arguments.any_revision and not arguments.resume:
        parser.error("--any-revision: only with --resume; without, all is measured again")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
