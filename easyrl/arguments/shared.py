"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="YAML file; easyrl init writes one, configs/ has more"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="settings over the file's: trainer.max_steps=20"),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's run.output_dir")]
WorldSize = Annotated[
    int | None, typer.Option(help="training processes; default: one copy of the model", min=1)
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the run in run.output_dir")]
# deepspeed's launcher gives it to each process; torch and DeepSpeed read LOCAL_RANK
LocalRank = Annotated[int | None, typer.Option("--local_rank", hidden=True)]
