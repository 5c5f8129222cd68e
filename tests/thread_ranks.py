"""Ranks that are threads of one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from easyrl.config import ConfigError
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks


class ThreadCollectives(Collectives):
    def __init__(self, rank: int, said: list[str], barrier: threading.Barrier) -> None:
        self.ranks = Ranks.data_parallel(rank, len(said))
        self._said, self._barrier = said, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._said[self.ranks.rank] = json.dumps(value)
        self._barrier.wait()
        gathered = [json.loads(said) for said in self._said]
        self._barrier.wait()
        return gathered


def on_ranks(num_ranks: int, work: Callable[[Collectives], Any]) -> list[Any]:
    """What ``work(collectives)`` of each rank returned, or the ``ConfigError`` that it raised."""
    said, barrier = [""] * num_ranks, threading.Barrier(num_ranks, timeout=10)

    def one(rank: int) -> Any:
        try:
            return work(ThreadCollectives(rank, said, barrier))
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))
