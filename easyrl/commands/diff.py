"""``easyrl diff RUN_DIR RUN_DIR``: where two recorded runs part; nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from easyrl.arguments.shared import AsJson

if TYPE_CHECKING:
    from easyrl.lab.first_difference import Compared, Difference


def diff_command(
    one: Annotated[Path, typer.Argument(help="a run's run.output_dir", metavar="RUN_DIR")],
    other: Annotated[Path, typer.Argument(help="another run's", metavar="RUN_DIR")],
    tolerance: Annotated[
        float,
        typer.Option(help="numbers are equal up to this share; weights are not compared", min=0),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Find the first batch, sample, token and number that differ; exits with 1 if any does."""
    from easyrl.lab.first_difference import first_difference
    from easyrl.ledger.recorded_run import RecordedRun

    try:
        compared = first_difference(RecordedRun(one), RecordedRun(other), tolerance)
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(orjson.dumps(compared).decode())  # a number that is not finite is null
    else:
        print(_told(compared))
    raise typer.Exit(0 if compared.difference is None else 1)


def _told(compared: Compared) -> str:
    lines = [_equal(compared)]
    if compared.difference is not None:
        lines += _differing(compared.difference)
    if compared.not_journalled:
        first, last = compared.not_journalled[0], compared.not_journalled[-1]
        lines.append(
            f"batches {first} to {last} have no journal in one of them, so that nothing is said of "
            "their tokens; journal.keep=all in the next run keeps it"
        )
    return "\n".join(lines)


def _equal(compared: Compared) -> str:
    until = "equal" if compared.difference is None else "equal before the difference"
    return (
        f"{compared.num_batches} batches {until}; {compared.num_groups} groups with "
        f"{compared.num_tokens} sampled tokens were compared"
    )


def _differing(found: Difference) -> list[str]:
    name = "" if found.name is None else f" {found.name}"
    return [
        f"first difference: {found.what}{name}{_place(found)}",
        f"  first run:  {_value(found.one)}",
        f"  second run: {_value(found.other)}",
    ]


def _place(found: Difference) -> str:
    parts = [
        "" if found.batch is None else f"batch {found.batch}",
        "" if found.step is None else f"step {found.step}",
        "" if found.prompt is None else "prompt {1} of epoch {0}".format(*found.prompt),
        "" if found.sample is None else f"sample {found.sample}",
        "" if found.token is None else f"token {found.token}",
    ]
    told = ", ".join(filter(None, parts))
    return f" ({told})" if told else ""


def _value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value)
