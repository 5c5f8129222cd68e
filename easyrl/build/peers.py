"""What ranks notice of each other: one that is lost ends the run, one that stops stops all."""

from __future__ import annotations

from contextlib import ExitStack

from easyrl.runtime.collectives import Collectives
from easyrl.runtime.heartbeats import Heartbeats
from easyrl.runtime.notices import Notices
from easyrl.runtime.signals import RunSignals
from easyrl.runtime.stacks import log_report
from easyrl.runtime.watchdog import UNWIND_S
from easyrl.schema import TEMPORARY_FAILURE


def watch_peers(
    collectives: Collectives, opened: ExitStack, signals: RunSignals, timeout_s: float
) -> Notices:
    """From now on the others are watched; returns the board that all ranks read. Collective.

    ``timeout_s``: ``watchdog.peer_timeout_s``.
    """
    store, ranks = collectives.open_store(), collectives.ranks
    opened.enter_context(
        Heartbeats(
            None if store is None else store.clone(),  # type: ignore[attr-defined]  # in no stub
            ranks.rank,
            ranks.world_size,
            timeout_s,
            lambda reason: _end_without_peer(signals, reason),
        )
    )
    peers = Notices(store, ranks.rank)
    opened.enter_context(signals.stop.follows_peers(peers))
    return peers


def _end_without_peer(signals: RunSignals, reason: str) -> None:
    """No checkpoint: writing one takes all ranks."""
    log_report(lambda: f"{reason}; ending with status {TEMPORARY_FAILURE}, go on with --resume")
    signals.end(TEMPORARY_FAILURE, UNWIND_S)
