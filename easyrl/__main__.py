"""The ``easyrl`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Strictly on-policy, periodically asynchronous RL training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def train(context: typer.Context) -> None:
    """Train in this process; on several devices use deepspeed --module easyrl.train CONFIG."""
    from easyrl import train

    raise typer.Exit(train.main(context.args))


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context) -> None:
    """Serve MODEL with the embedded inference server (vLLM's routes over transformers)."""
    from easyrl.inference_client import embedded_server

    raise typer.Exit(embedded_server.main(context.args))


@app.command("eval")
def evaluate(
    config: Annotated[Path, typer.Argument(help="YAML file with an evaluation section")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key.path=value]...")] = None,
) -> None:
    """Evaluate what the endpoints serve now on the held-out prompts; prints one JSON object."""
    from easyrl.evaluate import evaluate_endpoints

    raise typer.Exit(evaluate_endpoints(config, overrides or []))


def main() -> None:
    """Entry point of the console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
