"""A command's temporary folder goes with it, or stays and is named."""

import signal
from pathlib import Path

import pytest

from benchmarks.parts.scratch import scratch


@pytest.fixture(autouse=True)
def _handlers(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def use(keep_from_the_start: bool, keep_at_the_end: bool) -> Path:
    with scratch("test", keep=keep_from_the_start) as made:
        (made.folder / "file").touch()
        made.keep = keep_at_the_end
    return made.folder


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_said_at_the_end_counts(capsys, keep):
    folder = use(not keep, keep)
    assert folder.exists() == keep
    assert capsys.readouterr().err == (f"kept: {folder}\n" if keep else "")


@pytest.mark.parametrize("keep", [True, False])
def test_sigterm_unwinds_the_block(tmp_path, keep):
    with pytest.raises(SystemExit) as ended, scratch("test", keep=keep):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert bool(list(tmp_path.iterdir())) == keep
