"""Ends a run that makes no progress, and says in the log where it stands."""

from __future__ import annotations

import asyncio
import faulthandler
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from easyrl.config import WatchdogConfig
from easyrl.metrics.event_log import Record
from easyrl.runtime.notices import Notices
from easyrl.runtime.stacks import STDERR, log_report, task_stacks, thread_stacks

STUCK = 70  # exit status; sysexits.h: internal software error
UNWIND_S = 30.0  # from the interrupt until the process is ended
LONGEST_LOOK_S = 1.0
LONGEST_GAP_S = 10.0  # between two looks; more than that the whole process was stopped
OUTAGE_SLACK_S = 60.0
PEERS_S = 2 * LONGEST_LOOK_S  # until the other ranks have logged their stacks, too
CLOSE_S = 2 * LONGEST_LOOK_S  # a thread that reads the notices may wait for a lost rank 0
NOTICE = "stuck"


class TokenProgress:
    """Counts what is generated and trained on this rank, from the events that say so."""

    def __init__(self) -> None:
        self.generated = 0
        self.trained = 0
        self._in_micro_batch = 0

    def counting(self, record: Record) -> Record:
        """A ``record`` that is counted on its way."""

        def counted(event: str, **fields: Any) -> None:
            if event == "response_scored":
                self.generated += fields["num_tokens"]
            elif event == "micro_batch_start":
                self._in_micro_batch = fields["num_tokens"]
            elif event == "micro_batch_end":
                self.trained += self._in_micro_batch
            record(event, **fields)

        return counted

    @property
    def tokens(self) -> int:
        return self.generated + self.trained


class ProgressWindow:
    """Tokens per second over the last ``window_s`` seconds in which progress was to be expected."""

    def __init__(self, window_s: float, min_tokens_per_s: float) -> None:
        self._window_s = window_s
        self._min_tokens_per_s = min_tokens_per_s
        self._expected_s = 0.0
        self._looked_s: float | None = None
        self._seen: deque[tuple[float, int]] = deque()  # seconds of expectation, tokens by then

    def look(self, now_s: float, tokens: int, *, expected: bool = True) -> float | None:
        """The rate if it is too low over a full window, else None.

        ``tokens`` since the start; not ``expected`` if nothing could be done since the last look.
        """
        if self._looked_s is not None and expected:
            self._expected_s += min(now_s - self._looked_s, LONGEST_GAP_S)
        self._looked_s = now_s
        self._seen.append((self._expected_s, tokens))
        begin_s = self._expected_s - self._window_s
        while len(self._seen) > 1 and self._seen[1][0] <= begin_s:
            self._seen.popleft()
        first_s, before = self._seen[0]
        if first_s > begin_s:
            return None  # the window is not full yet
        rate = (tokens - before) / (self._expected_s - first_s)
        return rate if tokens == before or rate < self._min_tokens_per_s else None


@dataclass
class Watchdog:
    """Watches the tokens of this rank while the context is open.

    A window without enough of them: a report in the log, of the other ranks too, then ``end``. An
    outage counts only when it is longer than the pool's ``max_outage_s``. Code in C that never lets
    Python's threads run stops this one too: then faulthandler's ends the process, with status 1.
    """

    config: WatchdogConfig
    progress: TokenProgress
    describe: Callable[[], str]  # the state of queue and endpoints; from the watchdog's thread
    end: Callable[[], object]  # unwinds the run; returns at once
    in_outage: Callable[[], bool] = lambda: False
    max_outage_s: float = 0.0
    loop: asyncio.AbstractEventLoop | None = None  # of the producer, whose tasks are listed
    notices: Notices = field(default_factory=lambda: Notices(None, 0))
    frozen_margin_s: float = 30.0

    def __post_init__(self) -> None:
        self._look_s = min(LONGEST_LOOK_S, self.config.window_s / 20)
        self._outage_since_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="easyrl-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.config.window_s > 0:
            self._expect_next_look()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self.config.window_s > 0:
            self._thread.join(CLOSE_S)

    def _watch(self) -> None:
        window = ProgressWindow(self.config.window_s, self.config.min_tokens_per_s)
        said = ""
        try:
            while not self._closed.wait(self._look_s):
                self._expect_next_look()
                told = self.notices.read(NOTICE)
                if told is not None and told != said:  # that rank ends the run
                    said = told
                    self._report(f"the watchdog of {told}")
                now_s = time.monotonic()
                expected = not self._is_outage(now_s)
                rate = window.look(now_s, self.progress.tokens, expected=expected)
                if rate is not None:
                    self._fire(rate)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _expect_next_look(self) -> None:
        limit_s = self.config.window_s + self.frozen_margin_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)

    def _is_outage(self, now_s: float) -> bool:
        if not self.in_outage():
            self._outage_since_s = None
            return False
        if self._outage_since_s is None:
            self._outage_since_s = now_s
        return now_s - self._outage_since_s <= self.max_outage_s + OUTAGE_SLACK_S

    def _fire(self, rate: float) -> None:
        config, progress = self.config, self.progress
        reason = (
            f"{rate:.3g} tokens/s in {config.window_s:g} s, watchdog.min_tokens_per_s is "
            f"{config.min_tokens_per_s:g} ({progress.generated} generated, {progress.trained} "
            "trained so far)"
        )
        self.notices.post(NOTICE, reason)
        self._report(f"the watchdog ends the run: {reason}")
        if self.notices.has_readers:  # a launcher ends the others as soon as this one has ended
            self._closed.wait(PEERS_S)
        self.end()

    def _report(self, headline: str) -> None:
        def text() -> str:
            tasks = "" if self.loop is None else task_stacks(self.loop)
            return "\n".join([headline, self.describe(), tasks, thread_stacks()])

        log_report(text)
