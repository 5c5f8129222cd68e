"""A disk that takes nothing ends a run with one sentence, and costs nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from easyrl import train
from easyrl.build import parts
from easyrl.config.parallel import ParallelConfig
from easyrl.ledger.checkpoints.checkpoints import CheckpointError
from easyrl.ledger.journal.record_file import JournalError, RecordWriter
from easyrl.runtime.disk_faults import disk_fault
from easyrl.runtime.durable_files import remedy
from easyrl.runtime.streams import tolerant
from easyrl.schema import InterruptedRun


def os_error(code, path=None):
    return OSError(code, os.strerror(code), path)


def caused(error, cause):
    error.__cause__ = cause
    return error


def below(folder, code=errno.ENOSPC, name="file"):
    return os_error(code, str(folder / name))


FAULTS = {
    "a full disk": lambda folder: below(folder),
    "without a name": lambda folder: os_error(errno.ENOSPC),
    "with words of ours": lambda folder: OSError(errno.ENOSPC, "no space for weights", str(folder)),
    "a link that leads nowhere": lambda folder: below(folder, errno.ENOENT),
    "of the journal's thread": lambda folder: caused(
        RuntimeError("rollout production failed"),
        caused(JournalError("x.journal: cannot be written; make room"), below(folder)),
    ),
    "of a checkpoint": lambda folder: CheckpointError("was not written; make room"),
    "of safetensors": lambda folder: RuntimeError("I/O error: No space left (os error 28)"),
}


def ended_by(monkeypatch, folder, error, closed_batches):
    """How a run ends after ``closed_batches``; None: while its parts are made."""

    def fit():
        raise error(folder)

    def build(*_, **__):
        if closed_batches is None:
            raise error(folder)
        progress = SimpleNamespace(closed_batches=closed_batches)
        engine = SimpleNamespace(ranks=SimpleNamespace(rank=1))
        return SimpleNamespace(progress=progress, fit=fit), engine

    monkeypatch.setattr(parts, "build_parts", build)
    monkeypatch.setattr(train, "_checked", lambda config: config)
    config = SimpleNamespace(
        parallel=ParallelConfig(),
        run=SimpleNamespace(output_dir=folder),
        weight_sync=SimpleNamespace(directory=folder / "weights"),
    )
    signals = SimpleNamespace(begin_training=lambda: None)
    with pytest.raises(InterruptedRun) as raised:
        train.run(config, signals=signals)
    return raised.value


@pytest.mark.parametrize(("closed_batches", "status"), [(None, 2), (0, 2), (3, 75)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_ends_a_run_with_a_sentence(fault, closed_batches, status, tmp_path, monkeypatch):
    ended = ended_by(monkeypatch, tmp_path, FAULTS[fault], closed_batches)
    assert ended.status == status
    assert "make room" in str(ended) or "put back" in str(ended)
    if "journal" in fault:
        assert "x.journal" in str(ended)
    elif fault in ("a full disk", "a link that leads nowhere"):
        assert str(tmp_path / "file") in str(ended)


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.ENOENT, "/somewhere/else"),  # of a user's recipe, or a fault of ours
        os_error(errno.ECONNREFUSED),
        RuntimeError("shapes differ"),
        ValueError("(os error 104)"),
    ],
    ids=str,
)
def test_what_is_no_disk_keeps_its_traceback(error, tmp_path):
    assert disk_fault(error, [tmp_path]) is None


def test_a_damaged_record_stays_damaged(tmp_path):
    """No time mends it: the same command would end the same way."""
    error = caused(RuntimeError("rollout production failed"), JournalError("byte 3: was changed"))
    fault = disk_fault(error, [tmp_path])
    assert fault is not None and fault.text == "byte 3: was changed" and not fault.is_temporary


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "give permission"),
        (errno.ENOTDIR, "put back the folder or link"),
        (errno.EIO, "make room or give permission"),
    ],
)
def test_the_remedy_is_that_of_the_error(code, words):
    assert words in remedy(os_error(code))


def test_a_journal_whose_folder_is_a_link_that_leads_nowhere_says_so(tmp_path):
    (tmp_path / "journal").symlink_to(tmp_path / "gone" / "journal")
    with pytest.raises(JournalError, match="put back the folder or link") as failed:
        RecordWriter(tmp_path / "journal" / "x.journal", durable=False)
    assert "make room" not in str(failed.value)


BROKEN = """
import sys
from easyrl.runtime.streams import tolerant
for line in range(3):
    with tolerant(sys.stdout):
        print("row", line, flush=True)
with tolerant(sys.stdout):
    sys.stdout.flush()
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("broken", ["full", "closed pipe"])
def test_output_that_nobody_takes_ends_nothing(broken):
    """The status is that of the command, not of the interpreter's last flush."""
    if broken == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, stdout = os.pipe()
        os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    os.close(stdout)
    assert done.returncode == 0 and "went on" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.count("cannot be written") == 1


EVERYBODY = """
import sys
from easyrl.runtime.streams import tolerant_streams
with tolerant_streams():
    for line in range(3):
        print("row", line, flush=line == 1)
        print("row", line, file=sys.stderr)
print("behind")
sys.exit(75)
"""


def test_what_libraries_print_where_nobody_reads_ends_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", EVERYBODY], stdout=writing, stderr=writing)
    os.close(writing)
    assert done.returncode == 75


def test_what_is_printed_arrives_where_it_is_read():
    done = subprocess.run([sys.executable, "-c", EVERYBODY], capture_output=True, text=True)
    rows = "row 0\nrow 1\nrow 2\n"
    assert (done.stdout, done.stderr, done.returncode) == (rows + "behind\n", rows, 75)


def test_other_errors_behind_a_stream_are_raised():
    with pytest.raises(KeyError), tolerant(sys.stdout):
        raise KeyError("of ours")
