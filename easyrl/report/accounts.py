"""The accounts of all batches of a run, added up as the run goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from easyrl.report.growing_file import GrowingFile
from easyrl.timeline.accounting import LaneAccount, mean_shares
from easyrl.timeline.accounts_file import FILE, account_of_line
from easyrl.timeline.folder import FOLDER
from easyrl.timeline.spans import is_endpoint, is_rank

Shares = dict[str, dict[str, float]]  # "ranks" and "endpoints": cause → share of their time


class AccountsOfRun:
    """Sums of ``timeline/accounts.jsonl``, and the lanes of its newest batches."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.num_batches = 0
        self.newest: dict[int, list[LaneAccount]] = {}  # ``keep`` batches by their number
        self._keep = keep
        self._sums = _Sums()
        self._file = GrowingFile(run_dir / FOLDER / FILE, self._forget, self._add_line)

    def read_on(self) -> None:
        """What was written since the last time. Raises ``OSError``."""
        self._file.read_on()

    def shares(self) -> Shares:
        """Over all batches."""
        return self._sums.shares()

    def _forget(self) -> None:
        self.num_batches, self.newest, self._sums = 0, {}, _Sums()

    def _add_line(self, line: bytes) -> None:
        found = account_of_line(line)
        if found is None:
            return
        self.num_batches += 1
        self._sums.add(found.lanes)
        self.newest[found.batch] = found.lanes
        while len(self.newest) > self._keep:
            del self.newest[next(iter(self.newest))]


def shares_of(batches: Sequence[Sequence[LaneAccount]]) -> Shares:
    """Over the batches given."""
    sums = _Sums()
    for lanes in batches:
        sums.add(lanes)
    return sums.shares()


class _Sums:
    def __init__(self) -> None:
        self._wall_s = defaultdict[str, float](float)
        self._causes = {kind: defaultdict[str, float](float) for kind in ("ranks", "endpoints")}

    def add(self, lanes: Sequence[LaneAccount]) -> None:
        for each in lanes:
            kind = "ranks" if is_rank(each.lane) else "endpoints" if is_endpoint(each.lane) else ""
            if kind:
                self._wall_s[kind] += each.wall_s
                for cause, seconds in each.causes.items():
                    self._causes[kind][cause] += seconds

    def shares(self) -> Shares:
        return {
            kind: mean_shares([LaneAccount(kind, 0, self._wall_s[kind], causes)])
            for kind, causes in self._causes.items()
        }
