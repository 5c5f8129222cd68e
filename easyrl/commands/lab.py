"""``easyrl lab RUN_DIR --step N --with "key=value …"``: a recorded batch under other settings."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table

from easyrl.arguments.shared import AsJson, RunDir
from easyrl.runtime.terminal import print_plain

if TYPE_CHECKING:
    from easyrl.config import Config
    from easyrl.lab.variants import Comparison

OWN = "the run's own"
DIFFERENT = 1  # exit status
EXACT = 1e-6  # of the recorded gradient norm: how far the run's own settings may be from it


def lab_command(
    run_dir: RunDir,
    step: Annotated[int, typer.Option(help="optimizer step, from 1")],
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--with", help="settings of one variant; several: --with again", metavar="KEY=VALUE …"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recorded batch with other settings, without inference, and compare the gradients.

    All begin with the weights that the run had before the batch. The first row has the run's own
    settings; the status is 1 if they do not have the gradient norm that was recorded.
    """
    from easyrl.ledger.recorded_run import RecordedRun

    try:
        run = RecordedRun(run_dir)
        from easyrl.commands import replay

        v = replay.replayable_batch(run, step)
        recorded = run.metrics_of(v)
        from easyrl.build.lab import compare_variants

        def load(settings: Sequence[str]) -> Config:
            return replay.attempt_config(run, run.attempt_of(v), settings)

        asked = [shlex.split(variant) for variant in variants or ()]
        rows, own, at_rest = compare_variants(run, v, load, asked)
        reasons = [*replay.reasons_to_differ(run, load(()), own, ()), *replay.other_machine(run)]
        if own.weights[v] != run.batch(v).weights:
            reasons.append("the weights before the batch are not the run's to the bit")
    except (ValueError, OSError) as error:  # ConfigError and JournalError among them
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    then, again = (m.get("grad_norm") for m in (recorded, rows[0].metrics))  # None: not finite
    off = _difference(then, again)
    if as_json:  # a number that is not finite is null
        told = {"step": step, "recorded": recorded, "rows": rows, "difference": off}
        print(orjson.dumps(told | {"at_rest": at_rest}).decode())
    else:
        print_plain(_table(rows))
        for line in at_rest:
            print_plain(line)
        print_plain(f"step {step}: gradient norm {_norm(then)} as recorded, {_norm(again)} again")
    if off > EXACT:
        print(_warning(off, reasons), file=sys.stderr)
        raise typer.Exit(DIFFERENT)


def _difference(one: float | None, other: float | None) -> float:
    """Share of the larger one."""
    from easyrl.lab.first_difference import relative_difference

    return relative_difference(*(math.nan if each is None else each for each in (one, other)))


def _norm(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _warning(off: float, reasons: Sequence[str]) -> str:
    """What the rows are worth, and why."""
    lines = [
        f"easyrl: with the run's own settings the gradient norm is {off:.1e} of its value away "
        f"from the recorded one, more than {EXACT:g}: the rows are compared with each other, not "
        "with what the run did"
    ]
    if not reasons:
        reasons = ["nothing that is known explains it: look with easyrl replay, easyrl verify"]
    return "\n  ".join([*lines, *reasons])


def _table(rows: list[Comparison]) -> Table:
    """A row for each variant."""
    from easyrl.lab.variants import SHOWN

    several = any(row.later_cosines for row in rows)
    names = [name for name in SHOWN if any(name in row.metrics for row in rows)]
    headings = [SHOWN[name] for name in names]
    of_gradients = "gradient cosine" + (" by update" if several else "")
    table = Table("settings", *headings, of_gradients, "update norm", "update cosine")
    for row in rows:
        shown = [f"{row.metrics[n]:.6g}" if n in row.metrics else "" for n in names]
        cosines = ", ".join(f"{each:.6g}" for each in (row.gradient_cosine, *row.later_cosines))
        update = (f"{each:.6g}" for each in (row.update_norm, row.update_cosine))
        table.add_row(" ".join(row.settings) or OWN, *shown, cosines, *update)
    return table
