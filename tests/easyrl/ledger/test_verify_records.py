"""The certificate of a run on records: each record once, and what breaks that is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from easyrl.ledger.certificate.chain import START, chain_hash, encode_line
from easyrl.ledger.certificate.errors import CertificateError, OtherSettings
from easyrl.ledger.certificate.records import (
    AttemptRecord,
    BatchRecord,
    EndRecord,
    Record,
    RecordsBatch,
    RunRecord,
    TrainedRecord,
)
from easyrl.ledger.certificate.seal import SealKey
from easyrl.ledger.certificate.writer import Certificate
from easyrl.ledger.certificate_check import order_of
from easyrl.ledger.recorded_run import RecordedRun
from easyrl.ledger.verify import verify
from easyrl.ledger.verify_records import is_run_on_records, verify_records
from easyrl.runtime.run_files import CERTIFICATE_FILE, CONFIG_FILE, METRICS_FILE

NUM, BATCH = 10, 4
replace = msgspec.structs.replace
RUN = RunRecord("run", 1, True, NUM, BATCH, "f" * 64, source="records")


def digest(index: int) -> str:
    return blake3(str(index).encode()).hexdigest(length=16)


DIGESTS = [digest(i) for i in range(NUM)]


def attempt(number: int = 0, first_batch: int = 0, epochs: int | None = 1) -> AttemptRecord:
    return AttemptRecord(number, 1, first_batch, "start", epochs, 1, None)


def batch(v: int, number: int = 0, *, size: int = BATCH, outcome: Any = "trained") -> RecordsBatch:
    order = order_of(RUN)
    prompts = [order.prompt(BATCH * v + place) for place in range(size)]
    groups = [
        TrainedRecord(
            epoch=p.epoch, index=p.index, position=place, outcome=outcome, digest=digest(p.index)
        )
        for place, p in enumerate(prompts)
    ]
    ended_by: Any = "accepted" if size == BATCH else "data"
    return RecordsBatch(
        batch=v, step=v + 1, attempt=number, ended_by=ended_by, groups=groups, num_ranks=1
    )


WHOLE: list[Record] = [RUN, attempt(), batch(0), batch(1), batch(2, size=2), EndRecord("e" * 64, 3)]


def write(folder: Path, records: Sequence[Record], key: SealKey | None = None) -> Path:
    """A certificate whose chain is sound, whatever its lines say."""
    folder.mkdir(exist_ok=True)
    file = folder / CERTIFICATE_FILE
    file.write_bytes(b"")
    previous = START
    with file.open("ab", buffering=0) as opened:
        for record in records:
            opened.write(encode_line(record, previous, key))
            previous = chain_hash(file)
    return folder


def test_a_whole_run(tmp_path: Path) -> None:
    folder = write(tmp_path, WHOLE)
    assert is_run_on_records(folder)
    verdict = verify_records(folder, lambda: DIGESTS)
    assert verdict.is_sound
    assert str(verdict) == "10 records, each trained once, 3 batches, complete"
    assert "on-policy" not in str(verdict)
    assert verdict.seal_told.startswith("not sealed")
    blind = verify_records(folder)
    assert blind.is_sound and "tokens not compared" in str(blind)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    verdict = verify_records(write(tmp_path, WHOLE[:4]), lambda: DIGESTS)
    assert (
        str(verdict) == "8 records, each trained once, of 10 in the data, 2 batches, not complete"
    )
    with (tmp_path / CERTIFICATE_FILE).open("ab") as file:
        file.write(b'{"previous":"12')
    torn = verify_records(tmp_path, lambda: DIGESTS)
    assert torn.is_sound and "a line cut off at the end" in str(torn)


def test_several_epochs(tmp_path: Path) -> None:
    batches = [batch(v) for v in range(5)]
    lines = [RUN, attempt(epochs=2), *batches, EndRecord("e" * 64, 5)]
    verdict = verify_records(write(tmp_path, lines), lambda: DIGESTS)
    told = "10 records, each trained once in each of 2 epochs, 5 batches, complete"
    assert str(verdict) == told
    partly = verify_records(write(tmp_path, lines[:5]), lambda: DIGESTS)
    assert "2 epochs, the last of them not to its end, 3 batches" in str(partly)


def test_a_resumed_run_s_lines_replace_those_behind_its_checkpoint(tmp_path: Path) -> None:
    again = [attempt(1, first_batch=1), batch(1, 1), batch(2, 1, size=2), EndRecord("e" * 64, 3)]
    verdict = verify_records(write(tmp_path, [*WHOLE[:4], *again]), lambda: DIGESTS)
    told = "10 records, each trained once, 3 batches, 2 attempts, 1 line superseded, complete"
    assert str(verdict) == told


def test_records_of_a_skipped_step_are_counted(tmp_path: Path) -> None:
    lines = [*WHOLE[:3], batch(1, outcome="skipped"), *WHOLE[4:]]
    verdict = verify_records(write(tmp_path, lines), lambda: DIGESTS)
    assert verdict.is_sound and "4 of skipped steps" in str(verdict)
    assert (verdict.trained, verdict.skipped) == (6, 4)


def other(v: int, change: Callable[[list[TrainedRecord]], list[TrainedRecord]]) -> list[Record]:
    """``WHOLE`` with other records in batch ``v``."""
    lines = list(WHOLE)
    line = lines[2 + v]
    assert isinstance(line, RecordsBatch)
    lines[2 + v] = replace(line, groups=change(line.groups))
    return lines


def with_key_of(group: TrainedRecord, of: TrainedRecord) -> TrainedRecord:
    return replace(group, epoch=of.epoch, index=of.index, digest=of.digest)


FIRST = batch(0).groups
VIOLATIONS: dict[str, tuple[list[Record], str]] = {
    "twice in a batch": (
        other(0, lambda g: [*g[:3], with_key_of(g[3], g[0])]),
        f"line 3, batch 0, prompt {FIRST[0].index} of epoch 0: its record is there twice",
    ),
    "twice in two batches": (
        other(1, lambda g: [with_key_of(g[0], FIRST[2]), *g[1:]]),
        f"line 4, batch 1, prompt {FIRST[2].index} of epoch 0: is in batch 0 already: it would be",
    ),
    "left out": (
        other(1, lambda g: g[:3]),
        "batch 1: has 3 records (ended by accepted), its order",
    ),
    "left out at the end": (
        [*WHOLE[:4], EndRecord("e" * 64, 2)],
        "line 5: says that the run is complete, 8 of 10 records were trained",
    ),
    "another record": (
        other(2, lambda g: [with_key_of(g[0], g[1]), with_key_of(g[1], g[0])]),
        f"prompt {batch(2, size=2).groups[1].index} of epoch 0: is out of the dataset's order",
    ),
    "no such record": (other(0, lambda g: [replace(g[0], index=NUM), *g[1:]]), "no such prompt"),
    "a missing batch": ([*WHOLE[:2], WHOLE[3]], "line 3, batch 1: batch 0 is missing before it"),
    "a batch again": ([*WHOLE[:4], WHOLE[3]], "is certified already, in line 4"),
    "other tokens": (
        other(0, lambda g: [replace(g[0], digest="0" * 32), *g[1:]]),
        "was trained with tokens 000000000000, the data has",
    ),
    "no digest": (other(0, lambda g: [replace(g[0], digest=""), *g[1:]]), "has no digest"),
    "positions": (other(0, lambda g: [g[1], g[0], *g[2:]]), "its record is at position 1, 0 has"),
    "half a step skipped": (
        other(0, lambda g: [*g[:3], replace(g[3], outcome="skipped")]),
        "its record counts as skipped, others of its step do not",
    ),
    "another rank": (other(0, lambda g: [replace(g[0], rank=1), *g[1:]]), "on rank 1 of 1"),
    "another attempt": ([*WHOLE[:2], batch(0, 1)], "is of attempt 1, not 0"),
    "another step": ([*WHOLE[:2], replace(batch(0), step=2)], "step 2 is not behind step 0"),
    "a run on rollouts": ([replace(RUN, source="rollouts"), *WHOLE[1:3]], "in a run on rollouts"),
}


@pytest.mark.parametrize(("lines", "problem"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_is_named(tmp_path: Path, lines: list[Record], problem: str) -> None:
    verdict = verify_records(write(tmp_path, lines), lambda: DIGESTS)
    assert not verdict.is_sound
    assert problem in str(verdict) and str(verdict).startswith("NOT each record once: ")


def test_an_edited_line_is_found(tmp_path: Path) -> None:
    file = write(tmp_path, WHOLE) / CERTIFICATE_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    index = f'"index":{FIRST[0].index},'.encode()
    assert index in lines[2]
    edited = lines[2].replace(index, b'"index":%d,' % FIRST[1].index, 1)
    file.write_bytes(b"".join([*lines[:2], edited, *lines[3:]]))
    assert "line 3: it was changed after it was written" in str(verify_records(tmp_path))
    file.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    assert "line 4: does not follow line 3" in str(verify_records(tmp_path))


def test_metrics_ahead_of_the_certificate_betray_lines_that_were_removed(tmp_path: Path) -> None:
    write(tmp_path, WHOLE[:4])
    (tmp_path / METRICS_FILE).write_text(json.dumps({"step": 3, "loss": 1.0}) + "\n")
    assert "has step 3, the certificate ends with step 2" in str(verify_records(tmp_path))


def test_seal_and_published_hash(tmp_path: Path) -> None:
    key = SealKey(b"k" * 16)
    write(tmp_path, WHOLE, key)
    verdict = verify_records(tmp_path, key=key, chain=chain_hash(tmp_path / CERTIFICATE_FILE))
    assert (
        verdict.is_sound
        and verdict.seal_told == "seals checked, line 6 of 6 has the published hash"
    )
    assert "seal was not made" in str(verify_records(tmp_path, key=SealKey(b"j" * 16)))
    assert "no line has the published hash" in str(verify_records(tmp_path, chain="0" * 32))


def test_the_writer_refuses_what_verify_would(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path / CERTIFICATE_FILE, RUN, attempt())
    certificate.check(batch(0), whole=True)
    certificate.close_batch(batch(0))
    wrong = replace(
        batch(1), groups=[with_key_of(batch(1).groups[0], FIRST[0]), *batch(1).groups[1:]]
    )
    with pytest.raises(CertificateError, match="it would be trained twice"):
        certificate.check(wrong, whole=True)
    with pytest.raises(CertificateError, match="4 of 10 records were trained"):
        certificate.end("e" * 64)
    certificate.close()


def test_a_run_cannot_change_its_source(tmp_path: Path) -> None:
    write(tmp_path, WHOLE[:3])
    other_run = replace(RUN, source="rollouts")
    with pytest.raises(OtherSettings, match='source was .records.*put back source="records"'):
        Certificate(tmp_path / CERTIFICATE_FILE, other_run, attempt(1))


def test_a_batch_of_rollouts_is_none_of_records(tmp_path: Path) -> None:
    rollouts = BatchRecord(
        batch=0,
        step=1,
        version="run:0:0",
        weights="a" * 64,
        num_updates=1,
        num_drawn=0,
        ended_by="accepted",
        groups=[],
        confirmations=[],
        accepted_versions=["run:0:0"],
        discarded=[],
        skipped_updates=[],
        logprob_max=None,
        logprob_mean=None,
        num_ranks=1,
    )
    write(tmp_path, [*WHOLE[:2], rollouts])
    assert "is a batch of rollouts in a run on records" in str(verify_records(tmp_path))


def test_it_is_never_called_on_policy_and_nothing_is_replayed(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    with pytest.raises(ValueError, match="is a run on records"):
        verify(tmp_path)
    for name in (CONFIG_FILE, METRICS_FILE):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="is a run on records, of which nothing is journalled"):
        RecordedRun(tmp_path)
