"""Threads of processes that compute in turns and at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from easyrl.runtime.shared_cores import SUPPORTED, VARIABLE, SharedCores, shared_file

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs locks of open files (Linux)")

# Obeys lines of its input, says its number of threads.
OTHER = """
import sys, torch
from pathlib import Path
from easyrl.runtime.shared_cores import SharedCores
cores = SharedCores(Path(sys.argv[1]), num_cores=6)
for line in sys.stdin:
    getattr(cores, line.strip())()
    print(torch.get_num_threads(), flush=True)
"""


class Other:
    """Another process that shares."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str) -> int:
        """Its number of threads then."""
        assert self.process.stdin and self.process.stdout
        print(word, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts this process's number back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shared_file(tmp_path / "run") as file:
        yield file


def test_who_computes_has_an_equal_share(file: Path, threads: None) -> None:
    mine = SharedCores(file, num_cores=6)
    others = [Other(file), Other(file)]
    try:

        def taken() -> int:
            mine.take()
            return torch.get_num_threads()

        assert taken() == 6  # nobody else computes
        assert others[0].tell("take") == 3
        assert taken() == 3
        assert others[1].tell("take") == 2
        assert taken() == 2
        assert others[0].tell("take") == 2
        others[1].tell("rest")
        assert taken() == 3
        mine.rest()
        assert others[0].tell("take") == 6
        assert taken() == 3
        others[0].kill()  # in the middle of computing: its share is free
        assert taken() == 6
        mine.close()
        assert others[1].tell("take") == 6
    finally:
        for other in others:
            other.kill()
        mine.close()


def test_a_share_follows_who_ends_in_the_middle_of_a_computation(file: Path, threads: None) -> None:
    mine, other = SharedCores(file, num_cores=6), Other(file)
    try:

        def adjusted() -> int:
            mine.adjust()
            return torch.get_num_threads()

        other.tell("take")
        mine.take()
        assert adjusted() == 3
        other.tell("rest")
        assert torch.get_num_threads() == 3 and adjusted() == 6
        other.tell("take")
        assert adjusted() == 3
        with mine.computing(others_begin=True):  # whoever else computes by now
            other.tell("rest")
            assert adjusted() == 1
        torch.set_num_threads(2)
        assert adjusted() == 2  # it does not compute
    finally:
        other.kill()
        mine.close()


def test_everybody_has_a_thread(file: Path, threads: None) -> None:
    other = Other(file)
    try:
        other.tell("take")
        mine = SharedCores(file, num_cores=1)
        mine.take()
        assert torch.get_num_threads() == 1
        mine.close()
    finally:
        other.kill()


@pytest.mark.parametrize(("num_cores", "alone", "beside_two"), [(1, 1, 1), (5, 2, 1), (12, 6, 4)])
def test_a_server_leaves_half_of_the_cores_alone(
    file: Path, threads: None, num_cores: int, alone: int, beside_two: int
) -> None:
    """Also while nobody else computes."""
    others = [Other(file), Other(file)]
    server = SharedCores(file, num_cores, most=0.5)
    try:
        server.take()
        assert torch.get_num_threads() == alone
        for other in others:
            other.tell("take")
        server.take()
        assert torch.get_num_threads() == beside_two
    finally:
        server.close()
        for other in others:
            other.kill()


def test_one_thread_where_others_are_about_to_compute(file: Path, threads: None) -> None:
    mine, other = SharedCores(file, num_cores=6), Other(file)
    try:
        with mine.computing(others_begin=True):
            assert torch.get_num_threads() == 1
            assert other.tell("take") == 3
        assert other.tell("take") == 6  # it rests
        other.tell("rest")
        with pytest.raises(KeyError), mine.computing():
            assert torch.get_num_threads() == 6
            raise KeyError
        assert other.tell("take") == 6
    finally:
        other.kill()
        mine.close()


def test_with_nobody_threads_stay(threads: None) -> None:
    torch.set_num_threads(3)
    alone = SharedCores(num_cores=7)
    assert not alone and alone.environment == {}
    alone.take()
    alone.rest()
    alone.close()
    assert torch.get_num_threads() == 3


def test_servers_share_unless_threads_are_wished_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not SharedCores.of_environment()
    monkeypatch.setenv(VARIABLE, str(file))
    cores = SharedCores.of_environment()
    assert cores and cores.environment == {VARIABLE: str(file)}
    cores.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not SharedCores.of_environment()


def test_the_file_is_the_runs_and_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shared_file(tmp_path / "a") as first, shared_file(tmp_path / "b") as second:
        assert first != second
        assert first.stat().st_mode & 0o777 == 0o600
        with shared_file(tmp_path / "a") as again:
            assert again == first
    assert not first.exists() and not second.exists()
    target = tmp_path / "somebody's"
    target.touch()
    first.symlink_to(target)
    with pytest.raises(OSError), shared_file(tmp_path / "a"):
        pass
    with pytest.raises(OSError):
        SharedCores(first)
    first.unlink()
    first.touch()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(first).st_uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        SharedCores(first)


def test_one_thread_beside_foreign_processes_but_not_beside_who_shares(
    file: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0, 0.0]
    monkeypatch.setattr("easyrl.runtime.contention._clock_and_delay", lambda: (clock[0], clock[1]))
    mine, other = SharedCores(file, num_cores=4), Other(file)

    def taken(share: float) -> int:
        """Threads; then a second of computing, of which ``share`` is waiting for a processor."""
        mine.take()
        clock[0], clock[1] = clock[0] + 1, clock[1] + share
        return torch.get_num_threads()

    try:
        assert taken(0.0) == 4
        assert taken(0.5) == 4
        other.tell("take")  # in the middle of the stretch
        assert taken(0.5) == 2
        other.tell("rest")  # it was there as the stretch began
        assert taken(0.5) == 4
        other.tell("take")
        other.tell("rest")  # it has come and gone
        assert taken(0.5) == 4
        assert taken(0.0) == 1  # nobody shares, and a processor was waited for
        other.tell("take")
        other.tell("rest")
        mine.adjust()
        assert torch.get_num_threads() == 1
    finally:
        other.kill()
        mine.close()
