"""``easyrl convert FILE``: a configuration of TRL or verl as one of EasyRL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from easyrl.config import ConfigError


def convert_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="a GRPOConfig as to_json_string() writes it, or verl's YAML, Hydra's "
            "overrides.yaml, or a script with key.path=value",
            metavar="FILE",
        ),
    ],
    peer: Annotated[
        str | None, typer.Option("--from", help="trl or verl; default: by the file's keys")
    ] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("easyrl.yaml"),
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="processes of TRL's training, where the file does not tell"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="model.path")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="data.files; several times")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="a reward function; several times", metavar="FILE:FUNCTION"),
    ] = None,
) -> None:
    """Write the configuration of another trainer as ours, and say what has no counterpart."""
    from easyrl.convert.convert import PEERS, convert_file

    try:
        if peer is not None and peer not in PEERS:
            raise ConfigError(f"--from: {peer} is none of {', '.join(PEERS)}")
        if out.exists():
            raise ConfigError(f"{out} exists; remove it, or name another file with --out")
        further: dict[str, Any] = {}
        if model is not None:
            further["model.path"] = str(model)
        if data:
            further["data.files"] = [str(each) for each in data]
        if reward:
            further["rewards"] = [_reward(each) for each in reward]
        converted = convert_file(file, peer=peer, world_size=world_size, further=further)
        out.write_text(converted.text(str(file)))
    except (ConfigError, OSError) as error:
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for note in converted.notes:
        print(note)
    print(
        f"{out} is written, of {converted.peer.title}; easyrl train {out} --print-config shows it"
    )


def _reward(text: str) -> dict[str, str]:
    """Raises ``ConfigError``."""
    file, separator, function = text.rpartition(":")
    if not separator or not file or not function:
        raise ConfigError(
            f"--reward: {text} is not FILE:FUNCTION, such as rewards.py:compute_score"
        )
    return {"file": file, "function": function}
