"""``easyrl report RUN_DIR``: a run as one HTML file."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from easyrl.arguments.shared import RunDir
from easyrl.runtime.run_files import METRICS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from easyrl.config import Config
    from easyrl.report.collect import Verdict

WATCH_S = 5.0
MOST_SHARE = 0.05  # of a processor, that writing again and again takes


def report_command(
    run_dir: RunDir,
    output: Annotated[
        Path | None, typer.Option(help="file to write; default: report.html in RUN_DIR")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="write it again after each step, until Ctrl-C")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="check the certificate, as easyrl verify does; not with --watch")
    ] = True,
) -> None:
    """Write a run's report: curves, timeline, samples, certificate, in one file without network."""
    from easyrl.report.collect import Collector
    from easyrl.report.page import FILE, render
    from easyrl.report.written_mark import Watched, WrittenMark
    from easyrl.runtime.whole_files import write_whole

    path = output or run_dir / FILE
    check = _verified if verify and not watch else _not_verified
    run, mark = Collector(run_dir, check, _decoder), WrittenMark(path)

    def write(watched: Watched | None) -> None:
        write_whole(path, render(run.collect(), watched).encode())

    def write_watched() -> None:
        watched = mark.next(WATCH_S)
        write(watched)
        mark.set(watched.number)

    try:
        seen = _written(run_dir)
        if not watch:
            write(None)
            print(path)
            return
        with ExitStack() as at_end:
            at_end.callback(mark.remove)
            write_watched()
            print(path)
            _until_interrupted(run_dir, seen, write_watched)
            write(None)
    except (ValueError, OSError) as error:  # ConfigError among them
        print(f"easyrl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _until_interrupted(run_dir: Path, seen: tuple[float, ...], write: Callable[[], object]) -> None:
    """Writes whenever the run has written more than ``seen``, until Ctrl-C.

    Of a processor that the run may need it takes a small share, however fast the run is.
    """
    wait_s = WATCH_S
    try:
        while True:
            time.sleep(wait_s)
            if (now := _written(run_dir)) != seen:
                seen = now  # before: what the run writes meanwhile comes the next time
                start_s = time.process_time()
                write()
                wait_s = max(WATCH_S, (time.process_time() - start_s) / MOST_SHARE)
    except KeyboardInterrupt:
        print()


def _verified(run_dir: Path) -> Verdict:
    from easyrl.build.verify import verify_run
    from easyrl.report.collect import Verdict

    try:
        found = verify_run(run_dir)
    except (ValueError, OSError) as error:
        return Verdict("unknown", str(error))
    if not found.is_sound:
        return Verdict("broken", found.told)
    return Verdict("sound", f"{found.told}\n{found.certificate}")


def _not_verified(run_dir: Path) -> Verdict:
    from easyrl.report.collect import Verdict

    return Verdict("unknown", f"not checked here; easyrl verify {run_dir} does")


def _decoder(config: Config) -> Callable[[Sequence[int]], str]:
    from easyrl.build.tokenizer import load_tokenizer, token_decoder

    return token_decoder(load_tokenizer(config))


def _written(run_dir: Path) -> tuple[float, ...]:
    """When the run has written something that the report shows."""
    shown = (METRICS_FILE, "timeline", "samples")
    return tuple(
        path.stat().st_mtime if (path := run_dir / name).exists() else 0.0 for name in shown
    )
