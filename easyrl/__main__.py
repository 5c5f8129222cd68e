"""The ``easyrl`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Strictly on-policy, periodically asynchronous RL training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
endpoints = typer.Typer(
    help="The inference endpoints of a run, while it goes on.", no_args_is_help=True
)
app.add_typer(endpoints, name="endpoints")
RunDir = Annotated[Path, typer.Argument(help="the run's run.output_dir", metavar="RUN_DIR")]
Url = Annotated[str, typer.Argument(help="base URL, such as http://host:8000", metavar="URL")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def train(context: typer.Context) -> None:
    """Train in this process; on several devices use deepspeed --module easyrl.train CONFIG."""
    from easyrl import train

    raise typer.Exit(train.main(context.args))


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context) -> None:
    """Serve MODEL with the embedded inference server (vLLM's routes over transformers)."""
    from easyrl.inference_client.servers.embedded import server

    raise typer.Exit(server.main(context.args))


@app.command("eval")
def evaluate(
    config: Annotated[Path, typer.Argument(help="YAML file with an evaluation section")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key.path=value]...")] = None,
) -> None:
    """Evaluate what the endpoints serve now on the held-out prompts; prints one JSON object."""
    from easyrl.commands.evaluate import evaluate_endpoints

    raise typer.Exit(evaluate_endpoints(config, overrides or []))


@app.command()
def verify(run_dir: RunDir) -> None:
    """Check a run's certificate and journal; exits with 1, naming it, at the first violation."""
    from easyrl.ledger.verify import verify

    try:
        verdict = verify(run_dir)
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(verdict)
    raise typer.Exit(0 if verdict.on_policy else 1)


@app.command(context_settings=PASS_ON)
def replay(context: typer.Context) -> None:
    """Train a step of RUN_DIR again from its journal, without inference, and compare."""
    from easyrl.commands import replay

    raise typer.Exit(replay.main(context.args))


@endpoints.command("add")
def add_endpoint(run_dir: RunDir, url: Url) -> None:
    """Take in a server: it is given the current weights, proves them, and is used."""
    from easyrl.commands.endpoints import add_endpoint

    _tell(lambda: add_endpoint(run_dir, url))


@endpoints.command("remove")
def remove_endpoint(
    run_dir: RunDir,
    url: Url,
    force: Annotated[bool, typer.Option(help="even if it is the last: the run waits")] = False,
) -> None:
    """Let a server go: what it has in flight finishes, nothing new is sent."""
    from easyrl.commands.endpoints import remove_endpoint

    _tell(lambda: remove_endpoint(run_dir, url, force=force))


@endpoints.command("list")
def list_endpoints(run_dir: RunDir) -> None:
    """Show the run's servers and how they are."""
    from easyrl.commands.endpoints import endpoint_table

    _tell(lambda: endpoint_table(run_dir))


def _tell(command: Callable[[], Any]) -> None:
    """Prints what ``command`` returns, or what the user has to mend."""
    from rich.console import Console

    try:
        Console(soft_wrap=not sys.stdout.isatty()).print(command())
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
