"""Who may use a run's folder, between real processes; and files that a power cut left empty."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import BaseModel

from easyrl.config import ConfigError
from easyrl.runtime import durable_files as durable
from easyrl.runtime.run_folder import begin_attempt, locked_folder, prepare_output
from tests.thread_ranks import on_ranks

# Takes the folder, and starts a child that outlives it, as workers, fetchers and servers might.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from easyrl.runtime.run_folder import locked_folder
lock = locked_folder(Path(sys.argv[1]), 0)
lock.__enter__()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print(child.pid, flush=True)
time.sleep(60)
"""


def take(folder: Path, patience_s: float = 0) -> ExitStack:
    """Its lock, until that is closed."""
    lock = ExitStack()
    lock.enter_context(locked_folder(folder, patience_s))
    return lock


class Holder:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        self.child = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def holder(tmp_path):
    holder = Holder(tmp_path)
    yield holder
    holder.kill()
    os.kill(holder.child, signal.SIGKILL)


def test_a_folder_in_use_is_refused_naming_who_uses_it(holder, tmp_path, caplog):
    begun = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        take(tmp_path, 0.5)
    assert 0.5 <= time.monotonic() - begun < 5
    (waiting,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for told in (str(refused.value), waiting):
        assert str(tmp_path) in told and f"process {holder.process.pid} on " in told
        assert "trainer.grace_s" in told
    with pytest.raises(ConfigError):  # the attempt has not given it free
        take(tmp_path)


def test_a_killed_process_frees_its_folder_though_its_children_live(holder, tmp_path):
    killer = threading.Timer(0.3, holder.kill)
    killer.start()
    with locked_folder(tmp_path, 30):
        killer.join()
        os.kill(holder.child, 0)  # it lives
        assert (tmp_path / "run.lock").read_text().startswith(f"{os.getpid()} on ")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            take(tmp_path)
    take(tmp_path).close()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def none(descriptor, how):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr("easyrl.runtime.run_folder.fcntl.flock", none)
    take(tmp_path).close()
    assert "has no locks" in caplog.text


# ---- all ranks -----------------------------------------------------------------------------------


class Run(BaseModel):
    output_dir: Path
    name: str = "run"


class Trainer(BaseModel):
    grace_s: float = 0.0


class Settings(BaseModel):
    run: Run
    trainer: Trainer = Trainer()


def on_two_ranks(work):
    return on_ranks(2, work)


def test_all_ranks_are_refused_and_nothing_is_written(tmp_path):
    settings = Settings(run=Run(output_dir=tmp_path))
    with take(tmp_path), ExitStack() as opened:
        first, second = on_two_ranks(lambda a: prepare_output(settings, a, opened, resume=True))
    assert isinstance(first, ConfigError) and isinstance(second, ConfigError)
    assert f"process {os.getpid()} on " in str(first)
    assert str(second) == f"rank 0: {first}"
    assert [file.name for file in tmp_path.iterdir()] == ["run.lock"]


def test_the_folder_is_held_until_the_run_closes(tmp_path):
    settings = Settings(run=Run(output_dir=tmp_path / "new"))
    with ExitStack() as opened:
        prepared = on_two_ranks(lambda a: prepare_output(settings, a, opened, resume=False))
        assert prepared == [tmp_path / "new"] * 2
        with pytest.raises(ConfigError):
            take(tmp_path / "new")
    take(tmp_path / "new").close()


def test_a_run_that_ended_while_it_was_waited_for_is_not_begun_again(tmp_path):
    settings = Settings(run=Run(output_dir=tmp_path), trainer=Trainer(grace_s=30))
    lock = take(tmp_path)

    def end() -> None:
        (tmp_path / "metrics.jsonl").write_text("")
        lock.close()

    ending = threading.Timer(0.3, end)
    ending.start()
    with ExitStack() as opened:
        told = on_two_ranks(lambda a: prepare_output(settings, a, opened, resume=False))
    ending.join()
    assert all("add --resume" in str(error) for error in told)
    take(tmp_path).close()


# ---- the count of attempts -----------------------------------------------------------------------


def test_attempts_are_counted_on_all_ranks(tmp_path):
    settings = Settings(run=Run(output_dir=tmp_path))
    attempts = [on_two_ranks(lambda a: begin_attempt(settings, tmp_path, a)) for _ in range(2)]
    assert [[version.attempt for version in ranks] for ranks in attempts] == [[0, 0], [1, 1]]
    assert len({version.run for ranks in attempts for version in ranks}) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["attempt.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 1, "attempt": "x"}', '{"run": "r"}'])
def test_a_count_that_cannot_be_read_names_file_and_remedy(tmp_path, content):
    settings = Settings(run=Run(output_dir=tmp_path))
    (tmp_path / "attempt.json").write_text(content)
    told = on_two_ranks(lambda a: begin_attempt(settings, tmp_path, a))
    assert all(isinstance(error, ConfigError) for error in told)
    assert f"{tmp_path / 'attempt.json'}: cannot be read" in str(told[0])
    assert "remove it" in str(told[1])
    (tmp_path / "certificate.jsonl").write_text("")
    told = on_two_ranks(lambda a: begin_attempt(settings, tmp_path, a))
    assert "remove it" not in str(told[0])
    assert '"kind":"attempt"' in str(told[0]) and "certificate.jsonl" in str(told[0])
    assert (tmp_path / "attempt.json").read_text() == content


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Its bytes, then its name: after a power cut it is the old one or the new one."""
    done = []
    fsync, rename = os.fsync, Path.rename

    def look(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append((path.name, path.read_text() if path.is_file() else None))
        fsync(descriptor)

    def renamed(path, target):
        done.append(("rename", None))
        return rename(path, target)

    monkeypatch.setattr(durable.os, "fsync", look)
    monkeypatch.setattr(Path, "rename", renamed)
    durable.write_durably(tmp_path / "attempt.json", "new")
    assert done == [("attempt.json.part", "new"), ("rename", None), (tmp_path.name, None)]
    assert (tmp_path / "attempt.json").read_text() == "new"
