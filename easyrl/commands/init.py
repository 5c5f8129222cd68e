"""``easyrl init [PATH]``: asks for model, data, reward and devices, and writes a first file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def init_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="file to write")] = Path(
        "easyrl.yaml"
    ),
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="folder of a model; default: the demo's")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="file of prompts; default: the demo's")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="a built-in one, or FILE.py:FUNCTION; default: exact"),
    ] = None,
    inference_devices: Annotated[
        str | None, typer.Option(metavar="N", help="that servers have; 0: on the processors")
    ] = None,
    training_devices: Annotated[
        str | None, typer.Option(metavar="N", help="that are trained on")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing, take the defaults")] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite a file that is there")] = False,
) -> None:
    """Write a first configuration: asks for model, data, reward and devices; easyrl up runs it."""
    from rich.console import Console
    from rich.prompt import Confirm

    from easyrl.config.file import load_config
    from easyrl.first_config.questions import Given, answers_of
    from easyrl.first_config.written import written

    console = Console()
    asks = not yes
    try:
        if path.exists() and not force:
            if not asks:
                raise ValueError(f"{path} is there already; give --force, or another path")
            if not Confirm.ask(f"{path} is there already; overwrite it?", console=console):
                raise typer.Exit(1)
        given = Given(model, data, reward, inference_devices, training_devices)
        answers = answers_of(given, _num_accelerators, console if asks else None)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written(answers, path))
        load_config(path)  # what is wrong with both together
    except EOFError:
        print("easyrl: no answer was given; use --yes for the defaults", file=sys.stderr)
        raise typer.Exit(2) from None
    except (ValueError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{path} is written; start it with: easyrl up {path}")


def _num_accelerators() -> int:
    """GPUs or NPUs of this machine."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
