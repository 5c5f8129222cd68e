"""What a person sees of a run while it goes on: a row per step, and where the open one is."""

from __future__ import annotations

import re
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from easyrl.metrics.names import Names, name_for
from easyrl.metrics.step_progress import ProgressThread, StepClock, StepProgress, duration
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
SETS_SHOWN = 2  # of an evaluation, the first ones: with more a row is wider than 80 characters
ROWS_SHOWN = 12
IF_ANY = "reward/failures"  # shown where it is not zero
PLAIN_EVERY_S = 30.0  # where there is no terminal a step is told of only if it takes longer


def named_columns(columns: Columns, names: Names) -> Columns:
    """``columns`` with the names of a peer for headings, in lines: so they fit 80 characters."""

    def heading(own: str, metric: str) -> str:
        theirs = name_for(metric, names)
        return own if theirs == metric else re.sub(r"(?<=[/_])", "\n", theirs)

    return tuple((heading(own, metric), metric, form) for own, metric, form in columns)


def with_sets(columns: Columns, names: Sequence[str]) -> Columns:
    """``columns`` with the accuracy of each named set in place of that of the only one."""
    of_sets = tuple((name[:9], f"eval/{name}/accuracy", "{:.3f}") for name in names[:SETS_SHOWN])
    if not of_sets:
        return columns
    at = next(i for i, (_, metric, _) in enumerate(columns) if metric == "eval/accuracy")
    return (*columns[:at], *of_sets, *columns[at + 1 :])


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # for who writes; else rich ends the process


class _Drawn:
    """A table that is laid out once for each width: 8 ms, all else of an update takes 0.5."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lines: dict[int, list[list[Segment]]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if width not in self._lines:
            self._lines = {width: console.render_lines(self._table, options, pad=False)}
        for line in self._lines[width]:
            yield from line
            yield Segment.line()


class ConsoleView:
    """A table that updates in place on a terminal, plain lines elsewhere. A ``Tracker``.

    Where the open step is stands below the table, twice a second, until its row comes; elsewhere
    there is a line about it every ``PLAIN_EVERY_S`` seconds that it takes. A ``stream`` that nobody
    reads any more ends nothing.
    """

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO = sys.stdout,
        columns: Columns = COLUMNS,
        sample: Callable[[int], str] | None = None,
        look: Callable[[], StepProgress] | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._sample = sample  # lines to print behind a step, empty where it has none
        self._columns = columns
        self._console = _Console(file=stream)
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._seconds: deque[float] = deque(maxlen=ROWS_SHOWN)  # of the last steps, each
        self._last_step: int | None = None  # whose row is out
        self._steps_per_row = 1
        self._lock = threading.Lock()  # the trainer's thread logs, another shows progress
        self._clock = StepClock(time.monotonic())
        self._num_told = 0  # plain lines about the open step
        self._drawn = _Drawn(self._table())  # the rows that are out
        self._shown: list[str] = []  # below them
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            live = Live(self._table(), console=self._console, auto_refresh=False)
            with tolerant(stream):
                live.start()
                self._live = live
        self._progress = None if look is None else ProgressThread(look, self.show)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            if "time/step_s" in metrics:
                if self._last_step is not None:
                    self._steps_per_row = max(step - self._last_step, 1)
                self._seconds.append(metrics["time/step_s"] / self._steps_per_row)
            if step != self._last_step:  # else it is the evaluation of that step's weights
                self._last_step, self._num_told = step, 0
                self._clock.begin(time.monotonic())
            self._log(step, metrics)

    def show(self, progress: StepProgress) -> None:
        """Where the open step is. From any thread."""
        now_s = time.monotonic()
        with self._lock:
            head = self._clock.headline(
                progress, self._open_step(progress.step), self._left_s(now_s), now_s
            )
            lines = [head, *filter(None, [progress.counts(), progress.notes()])]
            if self._live is not None:
                if lines == self._shown:
                    return
                self._shown = lines
                below = (Text(line, no_wrap=True, overflow="crop") for line in lines)
                with tolerant(self._console.file):
                    self._live.update(Group(self._drawn, *below), refresh=True)
            elif self._clock.elapsed_s(now_s) >= PLAIN_EVERY_S * (self._num_told + 1):
                self._num_told += 1
                self._print_plain("  ".join(lines))

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        left = self._left()
        metrics = {m: v for m, v in metrics.items() if v or m != IF_ANY}
        if self._live is None:
            cells = [
                f"{''.join(head.splitlines())} {form.format(metrics[m])}"
                for head, m, form in self._columns
                if m in metrics
            ]
            self._print_plain("  ".join([f"step {self._step(step)}", *cells]) + left)
            self._print_sample(step)
            return
        before = [row for row in self._rows if row[0] != step]
        same = dict(next((row for number, row in self._rows if number == step), {}))
        self._rows = sorted([*before, (step, same | metrics)], key=itemgetter(0))[-ROWS_SHOWN:]
        self._drawn, self._shown = _Drawn(self._table()), []
        with tolerant(self._console.file):
            self._live.update(self._table(left.strip()), refresh=True)
        self._print_sample(step)

    def _print_plain(self, line: str) -> None:
        with tolerant(self._console.file):
            print(f"{time.strftime('%H:%M:%S')}  {line}", file=self._console.file, flush=True)

    def _print_sample(self, step: int) -> None:
        """Above the table, where that updates in place."""
        if self._sample is not None and (lines := self._sample(step)):
            with tolerant(self._console.file):
                self._console.print(Text(lines), soft_wrap=self._live is None)

    def note(self, name: str, text: str) -> None:
        """Nothing: the run's last line, behind all that ends, has it."""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._live is not None:
            with tolerant(self._console.file):
                self._live.update(self._table(self._left().strip()))
                self._live.stop()

    def _left(self) -> str:
        left_s = self._left_s(time.monotonic())
        return "" if left_s is None else f"  left {duration(left_s)}"

    def _left_s(self, now_s: float) -> float | None:
        """How long the run still takes, if its steps are as long as the last ones."""
        last, total = self._last_step, self._total_steps
        if last is None or total is None or not self._seconds or last >= total:
            return None
        step_s = statistics.median(self._seconds)
        # an open step may be longer than the last ones were: those behind it are still to come
        gone_s = min(self._clock.elapsed_s(now_s), step_s * self._steps_per_row)
        return step_s * (total - last) - gone_s

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

    def _open_step(self, step: int) -> str:
        total = self._total_steps
        if total is None:
            return f"step {step}"
        is_over = self._last_step is not None and self._last_step >= total
        return "all steps are trained" if is_over else f"step {min(step, total)}/{total}"

    def _step(self, step: int) -> str:
        """With the run's last one, where that is known."""
        return str(step) if self._total_steps is None else f"{step}/{self._total_steps}"
