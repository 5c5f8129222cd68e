"""``easyrl endpoints``: the endpoints of a run, changed and shown while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from easyrl.arguments.shared import RunDir
from easyrl.config.inference import endpoint_url, variable_name
from easyrl.inference_client.pool.endpoint_list import (
    WANTED_FILE,
    EndpointState,
    MembershipError,
    RunState,
    Wanted,
    change_wanted,
    read_state,
    read_wanted,
)
from easyrl.runtime.terminal import print_plain

endpoints_commands = typer.Typer(
    help="The inference endpoints of a run, while it goes on.", no_args_is_help=True
)
Url = Annotated[str, typer.Argument(help="base URL, such as http://host:8000", metavar="URL")]


@endpoints_commands.command("add")
def add_command(
    run_dir: RunDir,
    url: Url,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="variable of the run's own environment that holds the server's key; default: "
            "inference.api_key_env",
            metavar="NAME",
        ),
    ] = None,
) -> None:
    """Take in a server: it is given the current weights, proves them, and is used."""

    def change(wanted: Wanted) -> Wanted:
        if url in wanted.added:
            raise ValueError(
                f"{url} is an endpoint of {run_dir} already; to have an excluded one tried again, "
                "remove it first"
            )
        return wanted.with_added(url, api_key_env)

    with _refusals():
        url = endpoint_url(url)
        try:
            variable_name(api_key_env)
        except ValueError as error:
            raise ValueError(f"--api-key-env: {error}") from None
        _change(run_dir, change, f"{url} is added: it is given the weights, then used")


@endpoints_commands.command("remove")
def remove_command(
    run_dir: RunDir,
    url: Url,
    force: Annotated[bool, typer.Option(help="even if it is the last: the run waits")] = False,
) -> None:
    """Let a server go: what it has in flight finishes, nothing new is sent."""

    def change(wanted: Wanted) -> Wanted:
        if url not in wanted.added:
            known = ", ".join(wanted.added) or "none"
            raise ValueError(f"{url} is no endpoint of {run_dir}; there are: {known}")
        if len(wanted.added) == 1 and not force:
            raise ValueError(
                f"{url} is the last endpoint of {run_dir}: the run would wait until another is "
                "added, for inference.max_outage_s at most; add that one first, or use --force"
            )
        return wanted.without(url)

    with _refusals():
        url = endpoint_url(url)
        _change(run_dir, change, f"{url} is removed: what it has in flight finishes")


@endpoints_commands.command("list")
def list_command(run_dir: RunDir) -> None:
    """Show the run's servers and how they are."""
    with _refusals():
        wanted, state = _wanted(run_dir), _state(run_dir)
    seen = {} if state is None else {endpoint.url: endpoint for endpoint in state.endpoints}
    table = Table()
    table.add_column("endpoint", no_wrap=True)  # to be copied
    for name in ("state", "confirmed version"):
        table.add_column(name, overflow="fold")
    for name in ("in flight", "served", "failures"):
        table.add_column(name, justify="right")
    for url in dict.fromkeys([*wanted.added, *seen]):
        table.add_row(url, *_row(seen.get(url), is_wanted=url in wanted.added))
    print_plain(f"{run_dir}: {_describe_run(state)}")
    print_plain(table)


@contextmanager
def _refusals() -> Iterator[None]:
    """Says what the user has to mend, and ends with exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _row(endpoint: EndpointState | None, *, is_wanted: bool) -> tuple[str, ...]:
    if endpoint is None:
        return "not taken in yet", "", "", "", ""
    state = endpoint.state if is_wanted else f"leaving: {endpoint.state}"
    counts = (endpoint.in_flight, endpoint.served, endpoint.failures)
    return state, endpoint.confirmed_version or "none", *map(str, counts)


def _describe_run(state: RunState | None) -> str:
    if state is None:
        return "has not started yet"
    if state.is_alive:
        return "running"
    seconds = time.time() - state.updated_s
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"NOT RUNNING, last seen {ago} ago"


def _change(run_dir: Path, change: Callable[[Wanted], Wanted], what: str) -> None:
    _wanted(run_dir)
    change_wanted(run_dir, change)
    state = _state(run_dir)
    if state is not None and not state.is_alive:
        what += "; but the run is not running, and its next start takes inference.endpoints"
    print_plain(what)


def _wanted(run_dir: Path) -> Wanted:
    """Raises ``MembershipError`` if it is damaged, ``ValueError`` if there is no run."""
    try:
        return read_wanted(run_dir)
    except MembershipError:
        if (run_dir / WANTED_FILE).exists():
            raise
        raise ValueError(
            f"no run in {run_dir}, it has no {WANTED_FILE}; give the run's run.output_dir"
        ) from None


def _state(run_dir: Path) -> RunState | None:
    try:
        return read_state(run_dir)
    except MembershipError:
        return None  # it has not written any yet
