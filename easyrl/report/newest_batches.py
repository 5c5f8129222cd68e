"""The newest batches of a run's timeline, packed once for as long as their files stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from easyrl.report.accounts import Shares, shares_of
from easyrl.report.batches import packed_batch
from easyrl.report.stamps import Stamp, stamps
from easyrl.timeline.accounting import LaneAccount, account
from easyrl.timeline.folder import TimelineFolder
from easyrl.timeline.spans import BatchSpans

MOST_BATCHES = 200
MOST_READ = 16  # whose spans are kept: what advice looks at


class _Packed(NamedTuple):
    stamp: Stamp
    packed: str
    lanes: Sequence[LaneAccount]


class NewestBatches:
    """Of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = TimelineFolder(run_dir)
        self._packed: dict[int, _Packed] = {}
        self._read: dict[int, list[BatchSpans]] = {}

    def read_on(self, accounts: Mapping[int, list[LaneAccount]]) -> None:
        """What was written since the last time.

        ``accounts``: of batches by number, as far as they are known.
        """
        found = stamps((file.batch, file.path) for file in self._folder.files())
        newest = dict(list(found.items())[-MOST_BATCHES:])
        last, packed, read = list(newest)[-MOST_READ:], {}, {}
        for number, stamp in newest.items():
            known = self._packed.get(number)
            is_new = known is None or known.stamp != stamp
            if number in last and not is_new and number in self._read:
                read[number] = self._read[number]
            elif is_new or number in last:
                of_ranks = self._folder.read(number)
                if not of_ranks:
                    continue
                if is_new:
                    lanes = accounts.get(number) or account(of_ranks)
                    known = _Packed(stamp, packed_batch(of_ranks, lanes), lanes)
                if number in last:
                    read[number] = of_ranks
            assert known is not None
            packed[number] = known
        self._packed, self._read = packed, read

    @property
    def packed(self) -> dict[str, str]:
        """``packed_batch`` of each, by number."""
        return {str(number): each.packed for number, each in self._packed.items()}

    @property
    def spans(self) -> list[list[BatchSpans]]:
        """Of the last few batches, each of all ranks."""
        return list(self._read.values())

    @property
    def last(self) -> int | None:
        """The newest one's number; None: there is none."""
        return max(self._packed, default=None)

    def shares(self) -> Shares:
        return shares_of([each.lanes for each in self._packed.values()])
