"""``easyrl samples RUN_DIR``: what the model has written, also while a run goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.arguments.shared import RunDir
from easyrl.runtime.run_files import CONFIG_FILE, file_of_run

if TYPE_CHECKING:
    from rich.console import Console

    from easyrl.samples.folder import SampleFolder
    from easyrl.samples.records import SampledGroup
    from easyrl.samples.selection import Selection

POLL_S = 0.5


def samples_command(
    run_dir: RunDir,
    step: Annotated[
        int | None, typer.Option(help="optimizer step; default: the newest that is kept")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="index in the dataset; of all kept steps without --step")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="lowest mean reward of the step")] = False,
    best: Annotated[bool, typer.Option("--best", help="highest mean reward of the step")] = False,
    no_signal: Annotated[
        bool, typer.Option("--no-signal", help="all advantages are zero; the newest such step")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", help="a response was cut off; the newest such step")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="go on with each step that is written, until Ctrl-C")
    ] = False,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished", help="turns of episodes that are being played, or were cut off"
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="folder to decode with; default: the run's model.tokenizer"),
    ] = None,
) -> None:
    """Show the prompts and responses that a run has kept, with rewards and advantages."""
    from rich.console import Console

    from easyrl.samples.folder import SampleFolder
    from easyrl.samples.selection import Selection
    from easyrl.samples.show import print_group

    console = Console(markup=False, emoji=False, highlight=False)
    selection = Selection(step, prompt, worst, best, no_signal, truncated)
    try:
        if follow and step is not None:
            raise ValueError("--follow shows steps that are yet to come; leave --step off")
        decode = _decoder(run_dir, tokenizer)
        if unfinished:
            _print_unfinished(run_dir, decode, console)
            return
        folder = SampleFolder(run_dir)
        shown = _following(folder, selection) if follow else [selection.find(folder)]
        for groups in shown:
            for group in groups:
                print_group(group, decode, console)
    except BrokenPipeError:  # who reads has seen enough; nor is the rest to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
    except (ValueError, OSError) as error:  # ConfigError among them
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _print_unfinished(
    run_dir: Path, decode: Callable[[Sequence[int]], str], console: Console
) -> None:
    """Raises ``ValueError`` where there is none."""
    from rich.text import Text

    from easyrl.ledger.journal.turns import unfinished_episodes
    from easyrl.ledger.traces import JOURNAL_FOLDER
    from easyrl.samples.show import response_texts
    from easyrl.samples.turns import unfinished_response

    found = unfinished_episodes(run_dir / JOURNAL_FOLDER)
    if not found:
        raise ValueError(f"{run_dir}: no episode of the newest batch has a turn and no end")
    for file, start in found:
        (epoch, index, sample), response = start.sample, unfinished_response(start.turns)
        head = f"sample {sample} of prompt {index} of epoch {epoch}"
        told = f"attempt {file.attempt} | environment {start.environment}"
        console.print(Text(f"---- {head} | {told} | {response.num_turns} turns"), soft_wrap=True)
        for text, style in response_texts(response, decode):
            console.print(Text(text, style=style), soft_wrap=True)


def _following(folder: SampleFolder, selection: Selection) -> Iterator[list[SampledGroup]]:
    """The newest step's groups, then each later step's once every rank has written its own."""
    last = max(folder.steps(), default=1) - 1
    while True:
        steps = folder.steps()
        last = min(last, max(steps, default=last))  # a resumed run comes to some of them again
        for step in steps:
            if step > last and (folder.is_whole(step) or step < steps[-1]):
                last = step
                yield selection.of(folder.read(step))
        time.sleep(POLL_S)


def _decoder(run_dir: Path, folder: Path | None) -> Callable[[Sequence[int]], str]:
    """Text of token ids, special tokens too. Raises ``ConfigError``, ``ValueError``."""
    from easyrl.build.tokenizer import read_tokenizer, token_decoder
    from easyrl.config import ConfigError
    from easyrl.config.file import load_config

    file = file_of_run(run_dir, CONFIG_FILE)
    if folder is not None:
        return token_decoder(read_tokenizer(folder, "--tokenizer"))
    path = load_config(file, to_look_back=True).model.tokenizer_path
    try:
        return token_decoder(read_tokenizer(path))
    except ConfigError as error:
        raise ValueError(f"{error}, with --tokenizer DIR, or start where the run was") from error
