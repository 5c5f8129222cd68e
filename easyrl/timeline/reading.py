"""The timeline of a run, also while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans, Span


def kept_batches(run_dir: Path) -> list[int]:
    """The batches of a run that spans are kept of, in order."""
    return TimelineFolder(run_dir).batches()


def read_batch(run_dir: Path, batch: int) -> list[BatchSpans]:
    """What each rank has kept of ``batch``; empty if nothing is."""
    return TimelineFolder(run_dir).read(batch)


def read_spans(run_dir: Path, batch: int) -> list[Span]:
    """The spans of all ranks and endpoints of ``batch``, by their start."""
    spans = [span for of_rank in read_batch(run_dir, batch) for span in of_rank.spans]
    return sorted(spans, key=lambda span: span.start_s)


def chosen_batches(kept: Sequence[int], chosen: str | None) -> list[int]:
    """Those of ``kept`` in ``chosen``: "7", "3:9", "3:", ":9", both ends included; None: all.

    Raises ``ValueError`` for what is no range, or has no kept batch.
    """
    if chosen is None:
        return list(kept)
    first, colon, last = chosen.partition(":")
    try:
        low = int(first) if first else min(kept, default=0)
        high = (int(last) if last else max(kept, default=0)) if colon else low
    except ValueError:
        raise ValueError(f"{chosen!r} is no range of batches; write 7, 3:9, 3: or :9") from None
    found = [batch for batch in kept if low <= batch <= high]
    if not found:
        there = f"{min(kept)} to {max(kept)} are" if kept else "none is"
        raise ValueError(f"no batch of {chosen} is kept; {there} (timeline.keep)")
    return found
