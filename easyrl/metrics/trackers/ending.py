"""How a run ends, as services are told: finished, failed, or stopped by somebody."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from easyrl.schema import EndedBySignal, InterruptedRun


class RunEnding:
    """Known before the trackers are closed: ``ExitStack.push(ending.take)`` behind them.

    A stop that was asked for, with its checkpoint or by a second signal, is no failure; an outage
    is one, though ``--resume`` goes on.
    """

    def __init__(self) -> None:
        self.state: Literal["finished", "failed", "stopped"] = "finished"
        self.problem = ""  # of a run that failed

    def take(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """With what leaves the run, as ``__exit__`` gets it."""
        is_asked_for = isinstance(error, InterruptedRun) and error.status == 0
        if is_asked_for or isinstance(error, EndedBySignal | KeyboardInterrupt):
            self.state = "stopped"
        elif error is not None:
            self.state, self.problem = "failed", f"{type(error).__name__}: {error}"
