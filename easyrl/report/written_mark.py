"""The mark beside a watched report: tells a page that is open whether it was written again.

What is opened from a file may read no other file, but show an image: the width of this one is the
number of the report that was written last. No script can be in it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from easyrl.runtime.whole_files import write_whole

_NUMBERS = 1_000_000  # more than a day of tenths of a second, and as wide as images may be


class Watched(NamedTuple):
    """What a page has to know to follow its run."""

    number: int  # of what is written
    mark: str  # name of the file beside it that has the number of what was written last
    look_s: float  # how often it looks


class WrittenMark:
    """Of the report ``report``."""

    def __init__(self, report: Path) -> None:
        self._file = report.with_name(f"{report.name}.written.svg")

    def next(self, look_s: float) -> Watched:
        """For what is written now."""
        return Watched(int(10 * time.time()) % _NUMBERS + 1, self._file.name, look_s)

    def set(self, number: int) -> None:
        """When report ``number`` is there. Raises ``OSError``."""
        image = f'<svg xmlns="http://www.w3.org/2000/svg" width="{number}" height="1"/>'
        write_whole(self._file, image.encode())

    def remove(self) -> None:
        """Nothing is written any more: an open page loads itself once. Raises ``OSError``."""
        self._file.unlink(missing_ok=True)
