"""Section ``watchdog``: when a run counts as standing still."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from easyrl.config.base import Section


class WatchdogConfig(Section):
    """Ends a run that makes no progress, with all stacks in the log."""

    window_s: NonNegativeFloat = 3600.0  # 0: no watchdog
    min_tokens_per_s: NonNegativeFloat = 0.0  # generated and trained tokens of this rank, mean over
    # the window; 0: a run with any progress at all goes on
