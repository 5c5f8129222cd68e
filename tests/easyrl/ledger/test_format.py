"""A run folder of an earlier version is refused, naming the commit that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from easyrl.ledger.certificate.chain import START, encode_line
from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.history import History
from easyrl.ledger.certificate.records import RunRecord
from easyrl.ledger.checkpoints.folder import MANIFEST, Damaged, read_manifest, write_manifest
from easyrl.ledger.format import FORMAT
from easyrl.ledger.journal.record_file import JournalError, RecordWriter, read_records

LAST = "commit e7cfbd6 is the last that reads it"


def history_of(path: Path, form: int) -> History:
    run = RunRecord("run", 0, True, 4, 2, "data", format=form)
    path.write_bytes(encode_line(run, START))
    history = History(path)
    history.take_all()
    return history


def test_certificate(tmp_path: Path) -> None:
    run = history_of(tmp_path / "now.jsonl", FORMAT).run
    assert run is not None and msgspec.structs.asdict(run)["format"] == 2
    with pytest.raises(CertificateError, match=f"line 1: was written in format 1.*{LAST}"):
        history_of(tmp_path / "then.jsonl", 1)
    with pytest.raises(CertificateError, match="format 3.*use the one that wrote it"):
        history_of(tmp_path / "later.jsonl", 3)


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "batch"
    writer = RecordWriter(path, durable=False)
    writer.append(b"record")
    writer.close()
    content = path.read_bytes()
    assert [payload for _, payload in read_records(path)] == [b"record"]
    path.write_bytes(content.replace(b"journal 2", b"journal 1"))
    with pytest.raises(JournalError, match=f"was written in format 1.*{LAST}"):
        list(read_records(path))


def test_checkpoint(tmp_path: Path) -> None:
    write_manifest(tmp_path / MANIFEST, {"step": 1})
    assert read_manifest(tmp_path) == {"step": 1}
    content = json.loads((tmp_path / MANIFEST).read_text())
    del content["format"]  # as format 1 was written
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(Damaged, match=f"was written in format 1.*{LAST}"):
        read_manifest(tmp_path)
