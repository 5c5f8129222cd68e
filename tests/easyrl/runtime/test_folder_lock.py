"""Who may use a run's folder, between real processes; and files that a power cut left empty."""

import errno
import fcntl
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

from benchmarks.parts.bad_input.rule import Outcome, unclear
from easyrl.config import ConfigError
from easyrl.runtime import durable_files as durable
from easyrl.runtime.run_folder import keep_attempt, locked_folder, next_attempt, prepare_output
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
        # at the default settings the first is said at once, the second after a minute
        assert (
            unclear(Outcome(2, told, 0.0), ["run.output_dir", str(tmp_path)], 2, "no folder") == []
        )
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


@pytest.mark.parametrize("what", ["removed", "moved away", "another in its place"])
def test_a_folder_stays_held_without_its_lock_file(holder, tmp_path, what):
    """Somebody who takes ``run.lock`` for a leftover must not let a second trainer in."""
    lock = tmp_path / "run.lock"
    if what == "removed":
        lock.unlink()
    else:
        lock.rename(tmp_path / "aside")
    if what == "another in its place":
        lock.write_text("7 on elsewhere")
    with pytest.raises(ConfigError, match=f"{tmp_path} is in use by"):
        take(tmp_path)
    holder.kill()
    take(tmp_path).close()


@pytest.mark.parametrize("code", [errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP])
def test_where_folders_have_no_locks_the_file_is_what_is_held(tmp_path, monkeypatch, caplog, code):
    """A network file system may lock only what is open for writing."""
    flock = fcntl.flock

    def of_files(descriptor, how):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        flock(descriptor, how)

    monkeypatch.setattr("easyrl.runtime.run_folder.fcntl.flock", of_files)
    with locked_folder(tmp_path, 0), pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
        take(tmp_path)
    assert not caplog.messages


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
    attempts = []
    for _ in range(2):
        attempts.append(on_two_ranks(lambda a: next_attempt(settings, tmp_path, a)))
        seen_again = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))
        assert [version.attempt for version in seen_again] == [len(attempts) - 1] * 2
        keep_attempt(attempts[-1][0], tmp_path)  # it counts from here on
    assert [[version.attempt for version in ranks] for ranks in attempts] == [[0, 0], [1, 1]]
    assert len({version.run for ranks in attempts for version in ranks}) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["attempt.json"]


def test_runs_of_one_name_in_folders_of_one_path_are_two_runs(tmp_path):
    """Two clusters with the same paths, or a folder that was removed and made anew."""
    settings = Settings(run=Run(output_dir=tmp_path))
    born = []
    for _ in range(2):
        version = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))[0]
        keep_attempt(version, tmp_path)
        born.append(version.run)
        (tmp_path / "attempt.json").unlink()
    assert born[0] != born[1]
    assert all(run.startswith(f"{settings.run.name}-") for run in born)


def test_a_count_that_is_gone_is_not_begun_again(tmp_path):
    """A run's identity is in no other file than this and the certificate."""
    settings = Settings(run=Run(output_dir=tmp_path))
    (tmp_path / "certificate.jsonl").write_text("")
    told = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))
    assert all(isinstance(error, ConfigError) for error in told)
    assert "attempt.json" in str(told[1]) and '"kind":"attempt"' in str(told[1])
    assert not (tmp_path / "attempt.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 1, "attempt": "x"}', '{"run": "r"}'])
def test_a_count_that_cannot_be_read_names_file_and_remedy(tmp_path, content):
    settings = Settings(run=Run(output_dir=tmp_path))
    (tmp_path / "attempt.json").write_text(content)
    told = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))
    assert all(isinstance(error, ConfigError) for error in told)
    assert f"{tmp_path / 'attempt.json'}: cannot be read" in str(told[0])
    assert "remove it" in str(told[1])
    (tmp_path / "certificate.jsonl").write_text("")
    told = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))
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


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_is_told_once_and_used(tmp_path, monkeypatch, caplog, code):
    def cannot(descriptor):
        raise OSError(code, "cannot sync")

    monkeypatch.setattr(durable, "_told", set())
    monkeypatch.setattr(os, "fsync", cannot)
    for text in ("one", "two"):
        durable.write_durably(tmp_path / "attempt.json", text)
    assert (tmp_path / "attempt.json").read_text() == "two"
    (told,) = [message for message in caplog.messages if "cannot sync" in message]
    assert str(tmp_path) in told


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_may_be_lost_is_an_error_with_file_and_remedy(tmp_path, monkeypatch, code):
    def fails(descriptor):
        raise OSError(code, os.strerror(code))

    durable.write_durably(tmp_path / "attempt.json", "old")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"{os.strerror(code)}.*make room") as failed:
        durable.write_durably(tmp_path / "attempt.json", "new")
    assert failed.value.errno == code and failed.value.filename == str(tmp_path / "attempt.json")
    assert (tmp_path / "attempt.json").read_text() == "old"


def test_a_count_of_attempts_as_large_as_a_disk_is_not_read(tmp_path):
    settings = Settings(run=Run(output_dir=tmp_path))
    with (tmp_path / "attempt.json").open("wb") as sparse:
        sparse.truncate(2**40)
    told = on_two_ranks(lambda a: next_attempt(settings, tmp_path, a))
    assert "has more than" in str(told[0]) and "remove it" in str(told[1])
