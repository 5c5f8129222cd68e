"""The accounts of all batches of a run, a line of JSON each: ``timeline/accounts.jsonl``.

Spans are kept of the newest batches; what they added up to is kept of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from easyrl.runtime.whole_files import write_whole
from easyrl.timeline.accounting import (
    FAILING,
    FIRST_GROUP,
    GENERATING,
    IDLE,
    NOT_RECORDED,
    OTHERS_TAIL,
    STARVED,
    TAIL,
    UNEXPLAINED,
    LaneAccount,
    account,
    mean_shares,
)
from easyrl.timeline.folder import FOLDER, TimelineFolder
from easyrl.timeline.spans import BatchSpans, is_endpoint, is_rank
from easyrl.timeline.startup import startup_times_of

FILE = "accounts.jsonl"
_TRAINING = ("train", "look_ahead")


class BatchAccount(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one batch: its lanes' seconds by cause, and when training could begin."""

    batch: int
    lanes: list[LaneAccount]
    startup_s: dict[str, float] = {}  # fields of ``StartupTimes``; empty without groups

    def metrics(self) -> dict[str, float]:
        """Mean shares of the lanes' time, and equations (12) and (13), by the metrics' names."""
        ranks = mean_shares(each for each in self.lanes if is_rank(each.lane))
        endpoints = mean_shares(each for each in self.lanes if is_endpoint(each.lane))
        found = {
            "time/accounted_batch": float(self.batch),
            "time/trainer_waiting_share": _sum(ranks, (FIRST_GROUP, STARVED)),
            "time/trainer_training_share": _sum(ranks, _TRAINING),
            "time/unexplained_share": _sum(ranks, (UNEXPLAINED,)),
            "time/spans_left_out": float(max((each.left_out for each in self.lanes), default=0)),
        }
        if endpoints:
            found["time/inference_generating_share"] = _sum(endpoints, (GENERATING,))
            found["time/inference_tail_share"] = _sum(endpoints, (TAIL,))
            found["time/inference_failed_share"] = _sum(endpoints, (FAILING,))
            found["time/inference_idle_share"] = _sum(endpoints, IDLE)
            found["time/inference_others_tail_share"] = _sum(endpoints, (OTHERS_TAIL,))
            found["time/inference_unexplained_share"] = _sum(endpoints, (UNEXPLAINED, NOT_RECORDED))
        if self.startup_s:
            found["time/startup_sync_s"] = self.startup_s["sync_s"]
            found["time/startup_async_s"] = self.startup_s["async_s"]
        return found


def account_batch(of_ranks: Sequence[BatchSpans]) -> BatchAccount:
    """``of_ranks``: what each rank has kept of one batch, at least one. Seconds to 10 µs."""
    lanes = [
        msgspec.structs.replace(each, wall_s=round(each.wall_s, 5), causes=_rounded(each.causes))
        for each in account(of_ranks)
    ]
    startup = startup_times_of(of_ranks)
    startup_s = {} if startup is None else _rounded(startup._asdict())
    return BatchAccount(of_ranks[0].batch, lanes, startup_s)


class AccountsFile:
    """Written by the first rank when a batch is over, from what all ranks have kept of it.

    The others write theirs at the same time: what one of them has not yet written is accounted for
    behind the next batch, or when the run ends, with what is there then.
    """

    def __init__(self, folder: TimelineFolder, num_ranks: int, from_batch: int) -> None:
        """Lines of ``from_batch`` and later ones are dropped: they come again.

        Raises ``OSError``.
        """
        self.newest: BatchAccount | None = None
        self._folder, self._num_ranks, self._next = folder, num_ranks, from_batch
        self._last = from_batch - 1  # that this rank has written
        self._path = folder.path / FILE
        if self._path.exists():
            kept = [each for each in _read(self._path) if each.batch < from_batch]
            write_whole(self._path, b"".join(map(_line, kept)))

    def add(self, spans: BatchSpans) -> None:
        """``spans``: what this rank has just written. Raises ``OSError``."""
        self._last = spans.batch
        for batch in range(self._next, spans.batch + 1):
            of_ranks = [spans] if self._num_ranks == 1 else self._folder.read(batch)
            if len(of_ranks) < self._num_ranks and batch >= spans.batch - 1:
                return
            self._append(batch, of_ranks)

    def close(self) -> None:
        """With what is there. Raises ``OSError``."""
        for batch in range(self._next, self._last + 1):
            self._append(batch, self._folder.read(batch))

    def metrics(self) -> dict[str, float]:
        """Of the newest batch that is accounted for; empty before the first."""
        return {} if self.newest is None else self.newest.metrics()

    def _append(self, batch: int, of_ranks: Sequence[BatchSpans]) -> None:
        self._next = batch + 1
        if not of_ranks:
            return
        found = account_batch(of_ranks)
        with self._path.open("ab") as file:
            file.write(_line(found))
        self.newest = found


def read_accounts(run_dir: Path) -> list[BatchAccount]:
    """Of all batches of a run, in order; empty where there are none."""
    path = run_dir / FOLDER / FILE
    return _read(path) if path.exists() else []


def _read(path: Path) -> list[BatchAccount]:
    """Without a line that a crash has cut."""
    found = map(account_of_line, path.read_bytes().split(b"\n"))
    return [account for account in found if account is not None]


def account_of_line(line: bytes) -> BatchAccount | None:
    """None: a crash has cut it."""
    try:
        return msgspec.json.decode(line, type=BatchAccount)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _line(account: BatchAccount) -> bytes:
    return msgspec.json.encode(account) + b"\n"


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(each, 5) for name, each in seconds.items()}


def _sum(shares: Mapping[str, float], causes: Iterable[str]) -> float:
    return sum(shares.get(cause, 0.0) for cause in causes)
