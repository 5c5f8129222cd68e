"""``easyrl lab RUN_DIR --step N --with "key=value …"``: a recorded batch under other settings."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table

from easyrl.arguments.shared import AsJson, RunDir
from easyrl.runtime.terminal import print_plain

if TYPE_CHECKING:
    from easyrl.lab.variants import Comparison

OWN = "the run's own"


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
    settings.
    """
    from easyrl.ledger.recorded_run import RecordedRun

    try:
        run = RecordedRun(run_dir)
        from easyrl.commands.replay import attempt_config, replayable_batch

        v = replayable_batch(run, step)
        recorded = run.metrics_of(v)
        from easyrl.build.lab import compare_variants

        rows = compare_variants(
            run,
            v,
            lambda settings: attempt_config(run, run.attempt_of(v), settings),
            [shlex.split(variant) for variant in variants or ()],
        )
    except (ValueError, OSError) as error:  # ConfigError and JournalError among them
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:  # a number that is not finite is null
        print(orjson.dumps({"step": step, "recorded": recorded, "rows": rows}).decode())
        return
    print_plain(_table(rows))
    print_plain(
        f"step {step}: gradient norm {recorded['grad_norm']:.9g} as recorded, "
        f"{rows[0].metrics['grad_norm']:.9g} again"
    )


def _table(rows: list[Comparison]) -> Table:
    """A row for each variant."""
    from easyrl.lab.variants import SHOWN

    names = [name for name in SHOWN if any(name in row.metrics for row in rows)]
    headings = [SHOWN[name] for name in names]
    table = Table("settings", *headings, "gradient cosine", "update norm", "update cosine")
    for row in rows:
        shown = [f"{row.metrics[n]:.6g}" if n in row.metrics else "" for n in names]
        compared = (row.gradient_cosine, row.update_norm, row.update_cosine)
        table.add_row(" ".join(row.settings) or OWN, *shown, *(f"{each:.6g}" for each in compared))
    return table
