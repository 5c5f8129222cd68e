"""What a person sees of a run while it goes on: a row per step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from easyrl.runtime.streams import tolerant

Columns = tuple[tuple[str, str, str], ...]  # heading, metric, format

COLUMNS: Columns = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("tokens/s/device", "throughput/tokens_per_s_per_device", "{:,.0f}"),
    ("step s", "time/step_s", "{:.2f}"),
    ("trainer waited s", "time/wait_s", "{:.2f}"),
    ("inference idle s", "time/inference_idle_s", "{:.2f}"),
    ("sync s", "time/sync_s", "{:.2f}"),
    ("response tokens", "response/mean_tokens", "{:.1f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
)
RECORD_COLUMNS: Columns = (
    ("loss", "loss", "{:.4f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("accuracy", "policy/accuracy", "{:.3f}"),
    ("tokens/s/device", "throughput/tokens_per_s_per_device", "{:,.0f}"),
    ("step s", "time/step_s", "{:.2f}"),
    ("learning rate", "learning_rate", "{:.2e}"),
    ("grad norm", "grad_norm", "{:.3f}"),
)  # of a run on records
ROWS_SHOWN = 12


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
        self._last_accuracy: dict[str, float] = {}
        self._live: Live | None = None
        if self._console.is_terminal:
            live = Live(self._table(), console=self._console, auto_refresh=False)
            with tolerant(stream):
                live.start()
                self._live = live

    def log(self, step: int, metrics: dict[str, float]) -> None:
        shown = self._last_accuracy | metrics
        self._last_accuracy = {m: v for m, v in shown.items() if m == "eval/accuracy"}
        if self._live is None:
            cells = [
                f"{head} {form.format(shown[m])}" for head, m, form in self._columns if m in shown
            ]
            line = "  ".join([f"step {self._step(step)}", *cells])
            with tolerant(self._console.file):
                print(line, file=self._console.file, flush=True)
            self._print_sample(step)
            return
        before = [row for row in self._rows if row[0] != step]
        same = dict(next((row for number, row in self._rows if number == step), {}))
        self._rows = sorted([*before, (step, same | shown)], key=itemgetter(0))[-ROWS_SHOWN:]
        with tolerant(self._console.file):
            self._live.update(self._table(), refresh=True)
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

    def _table(self) -> Table:
        table = Table("step", *(heading for heading, _, _ in self._columns))
        for step, metrics in self._rows:
            cells = [
                form.format(metrics[m]) if m in metrics else "" for _, m, form in self._columns
            ]
            table.add_row(self._step(step), *cells)
        return table

    def _step(self, step: int) -> str:
        """With the run's last one, where that is known."""
        return str(step) if self._total_steps is None else f"{step}/{self._total_steps}"
