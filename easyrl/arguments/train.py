"""The command line of the trainer: ``easyrl train``, ``sft``, ``dpo``, and ``easyrl.train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from easyrl.arguments.shared import ConfigFile, LocalRank, Overrides, Resume

Seal = Annotated[
    Path | None,
    typer.Option(
        metavar="KEYFILE",
        help="seal the certificate's lines with the key in this file, outside the run's folder",
    ),
]


class TrainArguments(NamedTuple):
    """What a run is started with."""

    config: Path
    overrides: list[str]
    resume: bool
    seal: Path | None
    print_config: bool


def train_arguments(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    seal: Seal = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="show the resolved file and stop")
    ] = False,
    local_rank: LocalRank = None,
) -> TrainArguments:
    """Declares the command line for typer."""
    return TrainArguments(config, overrides or [], resume, seal, print_config)
