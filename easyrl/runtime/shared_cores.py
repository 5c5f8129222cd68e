"""Processors of one machine, divided among those of a run's processes that compute at the moment.

Trainer and embedded server take turns for a good part of each step: while one waits, the other has
its processors. Who computes holds a lock on a byte of a common file, and has an equal share of the
processors as threads of torch; a server half of them at most, since small decoding steps get slower
with more. One thread while processes that do not share are in the way (``contention.py``): the file
has the time at which one that shares last began. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from easyrl.runtime.contention import Contention
from easyrl.runtime.machine import usable_cpus

VARIABLE = "EASYRL_SHARED_CORES"  # the file's path, in the environment of servers
THREADS_VARIABLE = "OMP_NUM_THREADS"
MOST_OF_A_SERVER = 0.5  # docs/benchmarks.md, "Cores follow the work"
SUPPORTED = hasattr(fcntl, "F_OFD_SETLK")  # Linux; elsewhere numbers of threads stay
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_END = 2**62  # behind every byte that is locked


class SharedCores:
    """One process's part. ``take`` and ``rest`` belong to the thread that computes.

    Args:
        file: the same for all that share. None: there is nobody to share with, and the number of
            threads is left as it is.
        num_cores: that are divided.
        most: of them, that this process has at a time; a share. At least one core.
    """

    def __init__(
        self, file: Path | None = None, num_cores: int | None = None, most: float = 1.0
    ) -> None:
        self._num_cores = num_cores or min(torch.get_num_threads(), len(usable_cpus()))
        self._most = max(1, int(most * self._num_cores))
        self._path, self._file = file, None if file is None else _open(file)
        self._byte = os.getpid()  # another process has another one
        self._computes = False
        self._others: int | None = None  # who computed when this process took; None: not heeded
        self._last_beginning = b""  # of any process, as it was then
        self._contention = Contention()

    @classmethod
    def of_environment(cls) -> SharedCores:
        """A server's part, as ``VARIABLE`` says; with nobody where it is not set. ``OSError``."""
        path = os.environ.get(VARIABLE)
        return cls(Path(path) if path and can_share() else None, most=MOST_OF_A_SERVER)

    @property
    def num_cores(self) -> int:
        """That are divided."""
        return self._num_cores

    def __bool__(self) -> bool:
        """Whether there is somebody to share with."""
        return self._file is not None

    @property
    def environment(self) -> dict[str, str]:
        """For servers that are to share."""
        return {} if self._path is None else {VARIABLE: str(self._path)}

    def take(self, *, others_begin: bool = False) -> None:
        """This process computes, with as many threads as the others leave it now.

        ``others_begin``: one thread, as somebody else is about to compute who does not yet.
        """
        if self._file is None:
            return
        if not self._computes:
            self._lock(fcntl.F_WRLCK)
            self._computes = True
            os.pwrite(self._file, struct.pack("q", time.monotonic_ns()), 0)
        num_others = self._end_stretch()
        self._others = None if others_begin else num_others
        most = 1 if others_begin else self._share(num_others)
        _set_threads(self._contention.begin(most))

    def adjust(self) -> None:
        """Between two parts of a computation: as many threads as others leave it by now."""
        if not self._computes or self._others is None:
            return
        num_others = self._count_others(0, _END)
        if num_others != self._others:
            self._others = num_others
            _set_threads(self._contention.go_on(self._share(num_others)))

    def rest(self) -> None:
        """It does not, until it takes again."""
        if self._file is not None and self._computes:
            self._end_stretch()
            self._lock(fcntl.F_UNLCK)
            self._computes = False

    @contextmanager
    def computing(self, *, others_begin: bool = False) -> Iterator[None]:
        """Inside, this process computes (``take``)."""
        with self.rests_behind():
            self.take(others_begin=others_begin)
            yield

    @contextmanager
    def rests_behind(self) -> Iterator[None]:
        """Inside, this process computes at times; behind it, however that ends, it rests."""
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        """Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._computes = None, False

    def _share(self, num_others: int) -> int:
        """Threads, at least one."""
        return max(1, min(self._num_cores // (1 + num_others), self._most))

    def _end_stretch(self) -> int:
        """How many others compute. That one of them did in a stretch is no contention."""
        assert self._file is not None
        num_others = self._count_others(0, _END)
        beginning = os.pread(self._file, 8, 0)
        nobody_began = num_others == 0 and beginning == self._last_beginning
        self._contention.end(tells=nobody_began and self._others == 0)
        self._last_beginning = beginning
        return num_others

    def _lock(self, kind: int) -> None:
        assert self._file is not None
        asked = struct.pack(_FLOCK, kind, os.SEEK_SET, self._byte, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)

    def _count_others(self, start: int, end: int) -> int:
        """Locks of others on bytes ``[start, end)``; a microsecond for each."""
        if start >= end:
            return 0
        assert self._file is not None
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        told = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        kind, _, at, _, _ = struct.unpack(_FLOCK, told)
        if kind == fcntl.F_UNLCK:
            return 0
        return 1 + self._count_others(start, at) + self._count_others(at + 1, end)


def can_share() -> bool:
    """Not where the number of threads is somebody's wish."""
    return SUPPORTED and THREADS_VARIABLE not in os.environ


def _set_threads(number: int) -> None:
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextmanager
def shared_file(run_dir: Path) -> Iterator[Path]:
    """The file by which the processes of a run share, for as long as one of them has the block.

    On this machine, whatever file system ``run_dir`` is on.
    """
    digest = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"easyrl-cores-{os.getuid()}-{digest}"
    os.close(_open(file))
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _open(file: Path) -> int:
    """Raises ``OSError`` for what is not an own file."""
    number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(number).st_uid != os.getuid():
        os.close(number)
        raise PermissionError(f"{file} belongs to another user")
    return number
