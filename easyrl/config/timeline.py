"""Section ``timeline``: what is kept of when the trainer and the endpoints did what."""

from __future__ import annotations

from pydantic import NonNegativeInt

from easyrl.config.base import Section


class TimelineConfig(Section):
    """Spans of each batch in ``<output_dir>/timeline``, for ``easyrl trace`` (docs/timeline.md)."""

    keep: NonNegativeInt = 200  # batches; those of earlier ones are removed; 0: none is kept
