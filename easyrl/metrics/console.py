"""What a person sees of a run while it goes on: a row per step."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from operator import itemgetter
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from easyrl.metrics.names import Names, name_for
from easyrl.runtime.streams import tolerant

Columns = tuple[tuple[str, str, str], ...]  # heading, which a table has in lines; metric; format

# All of them fit 80 characters. Times are seconds of the step: what the trainer waited for groups,
# the endpoints had nothing to do, and the weights took to reach them.
COLUMNS: Columns = (
    ("reward", "reward/mean", "{:.3f}"),
    ("failed", "reward/failures", "{:.0f}"),
    ("eval", "eval/accuracy", "{:.3f}"),
    ("tok/s/dev", "throughput/tokens_per_s_per_device", "{:,.0f}"),
    ("step s", "time/step_s", "{:.2f}"),
    ("wait", "time/wait_s", "{:.2f}"),
    ("idle", "time/inference_idle_s", "{:.2f}"),
    ("sync", "time/sync_s", "{:.2f}"),
    ("length", "response/mean_tokens", "{:.0f}"),
    ("grad", "grad_norm", "{:.2f}"),
)
RECORD_COLUMNS: Columns = (
    ("loss", "loss", "{:.4f}"),
    ("eval", "eval/loss", "{:.4f}"),
    ("accuracy", "policy/accuracy", "{:.3f}"),
    ("tok/s/dev", "throughput/tokens_per_s_per_device", "{:,.0f}"),
    ("step s", "time/step_s", "{:.2f}"),
    ("rate", "learning_rate", "{:.1e}"),
    ("grad", "grad_norm", "{:.2f}"),
)  # of a run on records
ROWS_SHOWN = 12
IF_ANY = "reward/failures"  # shown where it is not zero


def named_columns(columns: Columns, names: Names) -> Columns:
    """``columns`` with the names of a peer for headings, in lines: so they fit 80 characters."""

    def heading(own: str, metric: str) -> str:
        theirs = name_for(metric, names)
        return own if theirs == metric else re.sub(r"(?<=[/_])", "\n", theirs)

    return tuple((heading(own, metric), metric, form) for own, metric, form in columns)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # for who writes; else rich ends the process


class ConsoleView:
    """A table that updates in place on a terminal, plain lines elsewhere. A ``Tracker``.

    A ``stream`` that nobody reads any more ends nothing.
    """

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO = sys.stdout,
        columns: Columns = COLUMNS,
        sample: Callable[[int], str] | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._sample = sample  # lines to print behind a step, empty where it has none
        self._columns = columns
        self._console = _Console(file=stream)
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._seconds: deque[float] = deque(maxlen=ROWS_SHOWN)  # of the last steps
        self._live: Live | None = None
        if self._console.is_terminal:
            live = Live(self._table(), console=self._console, auto_refresh=False)
            with tolerant(stream):
                live.start()
                self._live = live

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if "time/step_s" in metrics:
            self._seconds.append(metrics["time/step_s"])
        left = self._left(step)
        metrics = {m: v for m, v in metrics.items() if v or m != IF_ANY}
        if self._live is None:
            cells = [
                f"{''.join(head.splitlines())} {form.format(metrics[m])}"
                for head, m, form in self._columns
                if m in metrics
            ]
            line = "  ".join([time.strftime("%H:%M:%S"), f"step {self._step(step)}", *cells])
            with tolerant(self._console.file):
                print(line + left, file=self._console.file, flush=True)
            self._print_sample(step)
            return
        before = [row for row in self._rows if row[0] != step]
        same = dict(next((row for number, row in self._rows if number == step), {}))
        self._rows = sorted([*before, (step, same | metrics)], key=itemgetter(0))[-ROWS_SHOWN:]
        with tolerant(self._console.file):
            self._live.update(self._table(left.strip()), refresh=True)
        self._print_sample(step)

    def _print_sample(self, step: int) -> None:
        """Above the table, where that updates in place."""
        if self._sample is not None and (lines := self._sample(step)):
            with tolerant(self._console.file):
                self._console.print(Text(lines), soft_wrap=self._live is None)

    def note(self, name: str, text: str) -> None:
        """Nothing: the run's last line, behind all that ends, has it."""

    def close(self) -> None:
        if self._live is not None:
            with tolerant(self._console.file):
                self._live.stop()

    def _left(self, step: int) -> str:
        """How long the run still takes, if its steps are as long as the last ones."""
        if self._total_steps is None or not self._seconds or step >= self._total_steps:
            return ""
        seconds = statistics.median(self._seconds) * (self._total_steps - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def _table(self, caption: str = "") -> Table:
        has_any = any(IF_ANY in metrics for _, metrics in self._rows)
        columns = [column for column in self._columns if has_any or column[1] != IF_ANY]
        table = Table(box=None, padding=(0, 1, 0, 0), caption=caption or None)
        for heading in ("step", *(heading for heading, _, _ in columns)):
            table.add_column(heading, justify="right", no_wrap=True)
        for step, metrics in self._rows:
            cells = [form.format(metrics[m]) if m in metrics else "" for _, m, form in columns]
            table.add_row(self._step(step), *cells)
        return table

    def _step(self, step: int) -> str:
        """With the run's last one, where that is known."""
        return str(step) if self._total_steps is None else f"{step}/{self._total_steps}"
