"""Section ``watchdog``: when a run counts as standing still, or a rank as lost."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from easyrl.config.base import Section


class WatchdogConfig(Section):
    """Ends a run that makes no progress, with all stacks in the log, or that has lost a rank."""

    window_s: NonNegativeFloat = 3600.0  # 0: no watchdog
    min_tokens_per_s: NonNegativeFloat = 0.0  # generated and trained tokens of this rank, mean over
    # the window; 0: a run with any progress at all goes on
    peer_timeout_s: NonNegativeFloat = 120.0  # without a sign of life of another rank; the run then
    # ends with status 75, for --resume; 0: a lost node is waited for
