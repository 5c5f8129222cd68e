"""The version of what a run's folder holds: certificate, journal and checkpoints together."""

from __future__ import annotations

FORMAT = 2
_LAST_TO_READ = {1: "e7cfbd6"}  # commits


def other_format(found: int) -> str:
    """That a file is of another format than this version writes, and what reads it."""
    if found in _LAST_TO_READ:
        return (
            f"was written in format {found}, this version reads {FORMAT}; commit "
            f"{_LAST_TO_READ[found]} is the last that reads it"
        )
    return f"was written in format {found}, this version reads {FORMAT}; use the one that wrote it"
