"""Garbage collection of a process that makes many objects and hardly any cycles."""

from __future__ import annotations

import gc

# the defaults 700, 10, 10: a walk for each request, as a response's numbers are objects for a while
THRESHOLDS = (10_000, 20, 50)


def collect_rarely() -> None:
    """Has the collector leave alone what is there by now, and walk the rest seldom.

    To be called once everything is imported and built: walking that took 0.2 s at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
