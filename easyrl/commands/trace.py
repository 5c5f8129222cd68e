"""``easyrl trace RUN_DIR``: when what ran, for Perfetto, and where the time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.arguments.shared import RunDir
from easyrl.runtime.run_files import CONFIG_FILE, file_of_run

if TYPE_CHECKING:
    from easyrl.timeline.spans import BatchSpans


def trace_command(
    run_dir: RunDir,
    batches: Annotated[
        str | None,
        typer.Option(help="7, 3:9, 3: or :9; default: the newest that a browser can open"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="file to write; default: trace.json in RUN_DIR")
    ] = None,
) -> None:
    """Write a run's timeline as a trace for Perfetto, and print where the time went."""
    from rich.console import Console

    from easyrl.config import ConfigError
    from easyrl.config.file import load_config
    from easyrl.simulation.advice import advice_of_run
    from easyrl.timeline.accounting import account
    from easyrl.timeline.chrome_trace import FILE, MOST_EVENTS, newest_batches, write_trace
    from easyrl.timeline.folder import TimelineFolder
    from easyrl.timeline.reading import chosen_batches
    from easyrl.timeline.show import print_accounts, startup_line

    folder = TimelineFolder(run_dir)
    most_events: int | None
    try:
        config = load_config(file_of_run(run_dir, CONFIG_FILE), to_look_back=True)
        if not folder.batches():
            raise ValueError(
                f"{folder.path}: has no spans; the run was made with timeline.keep 0, by an "
                "earlier version, or has not ended its first batch"
            )
        if batches is None:
            chosen, most_events = newest_batches(folder), MOST_EVENTS
        else:
            numbers = chosen_batches(folder.batches(), batches)
            chosen = [each for number in numbers for each in folder.read(number)]
            most_events = None  # they are asked for
        path = output or run_dir / FILE
        written = write_trace(path, chosen, most_events)
    except (ConfigError, ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    by_number: dict[int, list[BatchSpans]] = {}
    for each in chosen:
        by_number.setdefault(each.batch, []).append(each)
    accounts = [lane for of_ranks in by_number.values() for lane in account(of_ranks)]
    console = Console(highlight=False)
    print_accounts(accounts, console)
    if (line := startup_line(list(by_number.values()))) is not None:
        console.print(line)
    console.print(advice_of_run(chosen, config))
    first, last = min(by_number), max(by_number)
    console.print(
        f"{path}: batches {first} to {last}, {written.num_events} events; open it at "
        "https://ui.perfetto.dev"
    )
    if written.num_left_out:
        console.print(
            f"{written.num_left_out} spans of requests, rewards and groups are not in it, as there "
            'are too many; endpoints\' time without a request is "not recorded" where a batch had '
            "too many to be kept"
        )
